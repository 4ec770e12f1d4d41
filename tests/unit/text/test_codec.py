"""Tokenizer and chat template of a checkpoint folder."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loopline.errors import CheckpointError, InvalidRequest
from loopline.text import TextCodec, load_text

TINY = Path(__file__).parents[3] / "configs/models/tiny-ouro"
IM_START, IM_END = 258, 259


def _codec(folder: Path = TINY) -> TextCodec:
    codec = load_text(folder)
    assert codec is not None
    return codec


def _folder(tmp_path: Path, template: Any = None, own_file: str | None = None, **config: Any) -> Path:
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    values = config if template is None else {**config, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
    if own_file is not None:
        (tmp_path / "chat_template.jinja").write_text(own_file, encoding="utf-8")
    return tmp_path


def _rendered(folder: Path, *messages: tuple[str, str]) -> str:
    return _codec(folder).render_chat(messages or [("user", "hi")])


def test_text_is_encoded_without_additions() -> None:
    assert _codec().encode("def ") == list(b"def ")
    assert _codec().encode("") == []
    assert _codec().encode("é<|im_end|>") == [0xC3, 0xA9, IM_END]


def test_a_lone_surrogate_is_the_clients_fault() -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate at character 2"):
        _codec().encode("ab\ud800")


def test_a_folder_without_a_tokenizer_has_no_codec(tmp_path: Path) -> None:
    assert load_text(tmp_path) is None


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_text(tmp_path)


def test_another_kind_of_decoder_is_refused(tmp_path: Path) -> None:
    layout = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    layout["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(layout), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"WordPiece.*allowed: ByteLevel"):
        load_text(tmp_path)


def test_chat_ends_where_the_answer_starts() -> None:
    expected = [IM_START, *b"user\nhi", IM_END, *b"\n", IM_START, *b"assistant\n"]
    assert _codec().has_chat_template
    assert _codec().encode(_codec().render_chat([("user", "hi")])) == expected


def test_no_template_and_no_messages_are_refused(tmp_path: Path) -> None:
    codec = _codec(_folder(tmp_path))
    assert not codec.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        codec.render_chat([("user", "hi")])
    with pytest.raises(InvalidRequest, match="messages is empty"):
        _codec().render_chat([])


def test_the_default_of_named_templates_is_used(tmp_path: Path) -> None:
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    assert _rendered(_folder(tmp_path, named)) == "yes"


def test_named_templates_without_a_default_are_none(tmp_path: Path) -> None:
    assert not _codec(_folder(tmp_path, [{"name": "tools", "template": "no"}])).has_chat_template


def test_the_templates_own_file_comes_first(tmp_path: Path) -> None:
    assert _rendered(_folder(tmp_path, "config", own_file="file")) == "file"


def test_special_tokens_blocks_filters_and_loop_controls(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{{ eos_token }}\n"
        "{% for m in messages %}\n"
        "    {% if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "{{ m | tojson }}{% generation %}!{% endgeneration %}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}go {{ strftime_now('%%') }}{% endif %}"
    )
    folder = _folder(tmp_path, template, bos_token="B", eos_token={"content": "E"}, pad_token=None)
    assert _rendered(folder, ("skip", ""), ("user", "é")) == 'BE\n{"role": "user", "content": "é"}!go %'


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.at_all }}", "nothing"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "messages|append|unsafe|safely"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|__mro__"),
    ],
)
def test_what_a_template_does_wrong_concerns_the_request(tmp_path: Path, template: str, words: str) -> None:
    codec = _codec(_folder(tmp_path, template))
    with pytest.raises(InvalidRequest, match=words):
        codec.render_chat([("user", "hi")])


@pytest.mark.parametrize("template", ["{% if %}", 5, ["x"]])
def test_a_template_that_cannot_be_read_is_named(tmp_path: Path, template: Any) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        load_text(_folder(tmp_path, template))


def test_a_broken_configuration_is_named(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (folder / "tokenizer_config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: not a JSON object"):
        load_text(folder)


def test_text_loads_without_torch() -> None:
    code = f"import sys, loopline.text; loopline.text.load_text({str(TINY)!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("text", ["", "a", "é" * 50, "<|im_start|>" * 20, "def f():\n    return 1\n"])
def test_no_text_is_longer_than_its_tokens_can_be(text: str) -> None:
    codec = _codec()
    assert len(text.encode()) <= codec.max_text_bytes(len(codec.encode(text)))
