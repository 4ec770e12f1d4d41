"""The detokenizer: pieces against one shot, stop strings against str.find."""

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from loopline.text import TextCodec, TextStream, load_text

TINY = Path(__file__).parents[3] / "configs/models/tiny-ouro"
BYTES = tuple(bytes([value]) for value in range(256))


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    codec = load_text(TINY)
    assert codec is not None
    return codec


def _cut(items: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    edges = [0, *sorted(cut % (len(items) + 1) for cut in cuts), len(items)]
    return [items[start:end] for start, end in itertools.pairwise(edges)]


def _stream(stream: TextStream, pieces: list[Sequence[int]]) -> str:
    return "".join([*(stream.push(piece) for piece in pieces), stream.finish()])


def _first_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the stop string that is complete first, the longest of those."""
    found = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not found:
        return text
    end, negative_length = min(found)
    return text[: end + negative_length]


@given(ids=st.lists(st.integers(0, 319)), cuts=st.lists(st.integers(0, 500), max_size=8))
def test_pieces_equal_the_tokenizers_own_decoding(ids: list[int], cuts: list[int]) -> None:
    reference = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    codec = load_text(TINY)
    assert codec is not None
    assert _stream(codec.decoder(), _cut(ids, cuts)) == reference.decode(ids, skip_special_tokens=True)


@given(text=st.text(max_size=60), cuts=st.lists(st.integers(0, 500), max_size=8))
def test_text_survives_any_cut(text: str, cuts: list[int]) -> None:
    assert _stream(TextStream(BYTES), _cut(list(text.encode()), cuts)) == text


@settings(max_examples=300)
@given(
    text=st.text(alphabet="aabé€", max_size=40),
    stops=st.lists(st.text(alphabet="aabé€", min_size=1, max_size=6), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 500), max_size=12),
)
def test_stop_strings_agree_with_find(text: str, stops: list[str], cuts: list[int]) -> None:
    stream = TextStream(BYTES, stops)
    assert _stream(stream, _cut(list(text.encode()), cuts)) == _first_stop(text, stops)
    assert stream.stopped == any(stop in text for stop in stops)


@given(text=st.text(alphabet="ab", max_size=40), stop=st.text(alphabet="ab", min_size=1, max_size=6))
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, stop: str) -> None:
    stream = TextStream(BYTES, [stop])
    given_out = ""
    for index, byte in enumerate(text.encode()):
        given_out += stream.push([byte])
        if stream.stopped:
            return
        held = text[len(given_out) : index + 1]
        assert stop.startswith(held)
        assert len(held) < len(stop)


def test_a_character_comes_out_when_its_last_byte_does() -> None:
    stream = TextStream(BYTES)
    assert [stream.push([byte]) for byte in "€!".encode()] == ["", "", "€", "!"]
    assert stream.push([0xE2, 0x82]) == ""
    assert stream.finish() == "\ufffd"


def test_endless_invalid_bytes_come_out_at_once() -> None:
    stream = TextStream(BYTES)
    assert stream.push([0xFF] * 3) == "\ufffd" * 3


def test_nothing_follows_a_stop_string(codec: TextCodec) -> None:
    stream = codec.decoder(["\n\n", "END"])
    assert stream.push(codec.encode("one\nE")) == "one\n"
    assert stream.push(codec.encode("N")) == ""
    assert stream.push(codec.encode("D two")) == ""
    assert stream.stopped
    assert stream.push(codec.encode("three")) == ""
    assert stream.finish() == ""


def test_a_possible_stop_string_at_the_end_is_text(codec: TextCodec) -> None:
    stream = codec.decoder(["END"])
    assert stream.push(codec.encode("the EN")) == "the "
    assert (stream.finish(), stream.stopped) == ("EN", False)


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert _stream(TextStream(BYTES, ["abcdef", "cd"]), [b"abcdef"]) == "ab"
    assert _stream(TextStream(BYTES, ["bcd", "cd"]), [b"abcdef"]) == "a"


def test_unknown_ids_have_no_text(codec: TextCodec) -> None:
    assert codec.decode([65, 100_000, 66]) == "AB"


def test_cost_is_linear() -> None:
    """Four times the answer, in single tokens, takes about four times as long, not sixteen."""

    def best_s(count: int) -> float:
        best = float("inf")
        for _ in range(3):
            stream = TextStream(BYTES, ["x" * 200])
            start = time.perf_counter()
            for _ in range(count):
                stream.push([97])
            best = min(best, time.perf_counter() - start)
        return best

    assert best_s(40_000) < 10 * best_s(10_000)


def test_tokens_of_many_bytes(tmp_path: Path) -> None:
    """A vocabulary with merges, as real checkpoints have it: the byte alphabet is undone within a token."""
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = [part for word in (" naïve", " €", "héé") for part, _ in byte_level.pre_tokenize_str(word)]
    vocab = {token: index for index, token in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()) + words)}
    reference = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    reference.decoder = tokenizers.decoders.ByteLevel()
    reference.add_special_tokens(["<|special|>"])
    reference.add_tokens(["⟨odd one⟩", "plain"])
    reference.save(str(tmp_path / "tokenizer.json"))
    codec = load_text(tmp_path)
    assert codec is not None
    ids = list(range(256, reference.get_vocab_size()))
    assert codec.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert codec.decode(ids) == " naïve €héé⟨odd one⟩plain"
