"""Options that commands share: the address, waiting, credentials, and those of a request."""

import functools
import inspect
import os
import typing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from loopline.intake import Chat, Prompt, RequestOptions
from loopline.request import InitialState
from loopline.security import Credentials, read_tokens

TOKEN_FILE_VARIABLE = "LOOPLINE_TOKEN_FILE"

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="Cluster YAML.", show_default=False)]


def host_and_port(address: str) -> str:
    """The same. Raises typer.BadParameter where it is no address."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 65536:
        raise typer.BadParameter(f"{address!r} is not HOST:PORT, such as 127.0.0.1:50051")
    return address


def maybe_host_and_port(address: str | None) -> str | None:
    """As `host_and_port`, of an option that need not be given."""
    return None if address is None else host_and_port(address)


Address = Annotated[
    str,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="The coordinator's address.",
        show_default=False,
        callback=host_and_port,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Return when it is done, or when it is ordered.")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="S", help="Most seconds of each wait.")]
Deadline = Annotated[float | None, typer.Option("--deadline", metavar="S", help="Seconds after which to give up.")]

Priority = Annotated[int, typer.Option("--priority", help="-10 to 10: of what waits, higher goes first.")]


def with_request_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `request_options` in place of its parameter `options`."""
    return with_options_of(request_options, command, "options")


def with_credential_files(command: Callable[..., None]) -> Callable[..., None]:
    """As `with_credentials`, for a command that has a `--config` of its own."""
    return with_options_of(credential_files, command, "credentials")


def with_credentials(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `shown_credentials` in place of its parameter `credentials`."""
    return with_options_of(shown_credentials, command, "credentials")


def with_options_of(make: Callable[..., Any], command: Callable[..., None], name: str) -> Callable[..., None]:
    """The command with the options of `make`, whose result becomes its parameter of that name."""
    own, shared = inspect.signature(command), inspect.signature(make)
    kept = [parameter for parameter in own.parameters.values() if parameter.name != name]

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        made = make(**{option: values.pop(option) for option in shared.parameters})
        command(**{name: made}, **values)

    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*kept, *shared.parameters.values())
    ]
    hints = {**typing.get_type_hints(make, include_extras=True)}
    hints.update(typing.get_type_hints(command, include_extras=True))
    wrapper.__annotations__ = {option: hint for option, hint in hints.items() if option != name}
    wrapper.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    del wrapper.__wrapped__
    return wrapper


_TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file", metavar="FILE", help=f"File with the token to show; else that in {TOKEN_FILE_VARIABLE}."
    ),
]
_CaFile = Annotated[
    Path | None, typer.Option("--ca-file", metavar="FILE", help="CA certificate of the coordinator; turns TLS on.")
]
_CertFile = Annotated[
    Path | None, typer.Option("--cert-file", metavar="FILE", help="Certificate to show, where one is asked for.")
]
_KeyFile = Annotated[Path | None, typer.Option("--key-file", metavar="FILE", help="Its private key.")]


def credential_files(
    *, token_file: _TokenFile = None, ca_file: _CaFile = None, cert_file: _CertFile = None, key_file: _KeyFile = None
) -> Credentials:
    """What to show to the coordinator, of files alone. Raises ConfigError for a file that is wrong."""
    token_file = token_file or _file_of_the_environment()
    return Credentials.from_files(ca_file=ca_file, cert_file=cert_file, key_file=key_file, token_file=token_file)


def shown_credentials(
    *,
    token_file: _TokenFile = None,
    ca_file: _CaFile = None,
    cert_file: _CertFile = None,
    key_file: _KeyFile = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="CONFIG", help="Cluster YAML, whose section security has all of these."),
    ] = None,
) -> Credentials:
    """What to show to the coordinator; a token file that the command line names goes before the one of `config`, and
    that goes before the environment's. Raises ConfigError for a file that is wrong, typer.BadParameter for files beside
    a `config`."""
    if config is None:
        return credential_files(token_file=token_file, ca_file=ca_file, cert_file=cert_file, key_file=key_file)
    if ca_file is not None or cert_file is not None or key_file is not None:
        raise typer.BadParameter("give either --config or --ca-file, --cert-file and --key-file")
    from loopline.config import load_config  # measuring an engine needs none of what it loads

    found = load_config(config, with_clients=False).read_security(with_clients=False).credentials
    return found if token_file is None else replace(found, token=read_tokens(token_file)[0])


def _file_of_the_environment() -> Path | None:
    """Not the option's own `envvar`, which could not be told from what the command line names."""
    file = os.environ.get(TOKEN_FILE_VARIABLE)
    return Path(file) if file else None


def request_options(
    *,
    prompt: Annotated[str | None, typer.Option(help="The prompt as text.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(metavar="ID,ID,...", help="The prompt as token ids.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's message.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    min_tokens: Annotated[int, typer.Option(help="No stop id before so many tokens.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens up to this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens less likely than this part of the best.")] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Keys sampling and noise; drawn if not given.")] = None,
    loops: Annotated[int | None, typer.Option(help="Depth: loops per token; the model's own if not given.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not end at the model's stop ids.")] = False,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    stop_token_ids: Annotated[str | None, typer.Option(metavar="ID,ID,...", help="Stop ids besides its own.")] = None,
    logprobs: Annotated[int | None, typer.Option(metavar="N", help="Also the N most likely tokens (--json).")] = None,
    exit_probabilities: Annotated[
        bool, typer.Option("--exit-probabilities", help="Also each loop's probability to be the last (--json).")
    ] = False,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="-2 to 2.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="-2 to 2.")] = 0.0,
    logit_bias: Annotated[list[str] | None, typer.Option(metavar="ID=VALUE", help="May be repeated.")] = None,
    initial_state: Annotated[InitialState | None, typer.Option(help="Huginn's state before the first loop.")] = None,
    session: Annotated[str, typer.Option(metavar="NAME", help="What this is a turn of, for the router.")] = "",
) -> RequestOptions:
    """The options as one record; typer.BadParameter for one that cannot be read."""
    return RequestOptions(
        prompt=_prompt(prompt, prompt_ids, chat),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=dict(_bias(entry) for entry in logit_bias or ()),
        stop=tuple(stop or ()),
        stop_token_ids=_ids("--stop-token-ids", stop_token_ids),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        exit_probabilities=exit_probabilities,
        loops=loops,
        initial_state=initial_state,
        session=session,
    )


def _prompt(text: str | None, ids: str | None, chat: bool) -> Prompt:
    if text is not None and ids is None:
        return Chat((("user", text),)) if chat else text
    if text is None and ids is not None and not chat:
        return _ids("--prompt-ids", ids)
    raise typer.BadParameter("give either --prompt, which --chat sends as a message, or --prompt-ids")


def _ids(name: str, text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in (text or "").split(",") if part.strip())
    except ValueError:
        raise typer.BadParameter(f"{name} is {text!r}; allowed: token ids with commas between") from None


def _bias(entry: str) -> tuple[int, float]:
    token_id, _, value = entry.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise typer.BadParameter(f"--logit-bias is {entry!r}; allowed: ID=VALUE") from None
