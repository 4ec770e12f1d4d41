"""A checkpoint's chat template, rendered as the transformers library does it, in a sandbox.

Source: "Chat templates" in the transformers documentation. The template is the checkpoint's, the messages are a
client's: the sandbox keeps both from reaching anything but the values handed in.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.nodes
import jinja2.parser
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loopline.errors import CheckpointError, InvalidRequest

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """A compiled template with the names of the special tokens that it may use."""

    def __init__(self, template: jinja2.Template, variables: Mapping[str, str]) -> None:
        self._template = template
        self._variables = variables

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """The text of (role, content) messages, ending where the answer starts.

        Raises InvalidRequest with the template's own words if it refuses them.
        """
        records = [{"role": role, "content": content} for role, content in messages]
        try:
            return self._template.render(messages=records, add_generation_prompt=True, **self._variables)
        except Exception as error:  # a template is a program: anything it does wrong concerns this request only
            raise InvalidRequest(f"the chat template refused the messages: {error}") from error


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The template of chat_template.jinja, else of tokenizer_config.json; None without one.

    Raises CheckpointError that names the file that is wrong.
    """
    config_path, own_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = _read_config(config_path)
    try:
        source = own_path.read_text(encoding="utf-8") if own_path.is_file() else _default(config.get("chat_template"))
        template = None if source is None else _environment().from_string(source)
    except (OSError, UnicodeDecodeError, jinja2.TemplateSyntaxError) as error:
        path = own_path if own_path.is_file() else config_path
        raise CheckpointError(f"{path}: the chat template cannot be read: {error}") from error
    except TypeError:
        raise CheckpointError(f"{config_path}: chat_template is neither text nor a list of named templates") from None
    return None if template is None else ChatTemplate(template, _token_names(config))


def _default(value: Any) -> str | None:
    """The template to use: the text itself, or the one named "default" in a list."""
    if value is None or isinstance(value, str):
        return value
    for entry in value if isinstance(value, list) else [None]:
        if not (isinstance(entry, dict) and isinstance(entry.get("template"), str)):
            raise TypeError
    return next((entry["template"] for entry in value if entry.get("name") == "default"), None)


def _token_names(config: Mapping[str, Any]) -> dict[str, str]:
    names = {}
    for key in _TOKEN_NAMES:
        value = config.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            names[key] = value
    return names


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _GenerationTag(Extension):
    """{% generation %} marks an answer's text for training; when serving it stands for its content."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
