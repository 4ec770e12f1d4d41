"""A checkpoint's tokenizer.json with its chat template: text and messages to token ids, token ids back to text.

Served are byte-level tokenizers (both model families have one): every token stands for some bytes, so that decoding is
a table and needs no look back.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from loopline.errors import CheckpointError, InvalidRequest
from loopline.text.chat import ChatTemplate, load_chat_template
from loopline.text.stream import TextStream

_NORMALIZED = 4  # most bytes of text that a normalizer makes one of: NFC's worst is 3, of U+212A (kelvin)


class TextCodec:
    """Tokenizer and chat template of one checkpoint folder. Immutable once made, and free to be shared by threads."""

    def __init__(self, tokenizer: Any, token_bytes: tuple[bytes, ...], chat: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._token_bytes = token_bytes
        self._chat = chat
        names = [token.content.encode("utf-8") for token in tokenizer.get_added_tokens_decoder().values()]
        shrinkage = 1 if tokenizer.normalizer is None else _NORMALIZED
        self._longest_token_bytes = shrinkage * max(map(len, (*token_bytes, *names)), default=1)

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def max_text_bytes(self, num_tokens: int) -> int:
        """No text of more bytes has so few tokens. To be asked before `encode`, which takes seconds for megabytes."""
        return num_tokens * self._longest_token_bytes

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text. Nothing is added around it; a special token's name in the text becomes that token.

        Raises InvalidRequest for text that is not Unicode (a lone surrogate).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the text has a lone surrogate at character {error.start}") from None
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def render_chat(self, messages: Sequence[tuple[str, str]]) -> str:
        """The text to encode for (role, content) messages, with the opening of the answer's turn.

        Raises InvalidRequest if the checkpoint has no chat template, or if the template refuses the messages.
        """
        if self._chat is None:
            raise InvalidRequest("the checkpoint has no chat template; send text or token ids instead of messages")
        if not messages:
            raise InvalidRequest("messages is empty; at least one message is needed")
        return self._chat.render(messages)

    def decoder(self, stop: Sequence[str] = ()) -> TextStream:
        """A fresh detokenizer for one answer that watches for these stop strings."""
        return TextStream(self._token_bytes, stop)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole answer; special tokens are left out."""
        stream = self.decoder()
        return stream.push(token_ids) + stream.finish()


def load_text(folder: str | Path) -> TextCodec | None:
    """The text handling of a checkpoint folder; None if it has no tokenizer.json.

    Raises CheckpointError that names the file that is wrong.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        layout = json.loads(path.read_text(encoding="utf-8"))
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: {error}") from error
    _require_byte_level(path, layout)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TextCodec(tokenizer, _token_bytes(tokenizer), load_chat_template(Path(folder)))


def _require_byte_level(path: Path, layout: dict[str, Any]) -> None:
    decoder = layout.get("decoder") or {}
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if [kind for kind in kinds if kind != "Fuse"] != ["ByteLevel"]:
        raise CheckpointError(f"{path}: decoder is {kinds!r}; allowed: ByteLevel")


def _token_bytes(tokenizer: Any) -> tuple[bytes, ...]:
    """The bytes of every token by id; none for special tokens and for ids that the tokenizer does not know."""
    vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    byte_of = _byte_of_character()
    for token, token_id in vocab.items():
        if token_id in added and added[token_id].special:
            continue
        try:
            table[token_id] = bytes(byte_of[character] for character in token)
        except KeyError:  # an added token with characters outside the byte alphabet stands for itself
            table[token_id] = token.encode("utf-8")
    return tuple(table)


def _byte_of_character() -> dict[str, int]:
    """The byte alphabet of GPT-2: printable bytes stand for themselves, the others for characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet
