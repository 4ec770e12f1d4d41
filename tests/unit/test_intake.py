"""Options to request: defaults, stop ids, depth, and text where there is no tokenizer."""

import dataclasses
from pathlib import Path

import pytest

from loopline.errors import InvalidRequest, NoTokenizer, RequestTooLarge
from loopline.intake import Chat, RequestOptions, check_deadline_s, resolve_request
from loopline.model_spec import load_model_spec
from loopline.request import InitialState, Request, SamplingParams
from loopline.text import TextCodec, load_text

TINY = Path(__file__).parents[2] / "configs/models/tiny-ouro"
SPEC = load_model_spec(TINY)
CODEC = load_text(TINY)


def _resolve(options: RequestOptions, *, with_codec: bool = True, max_loops: int = 4) -> Request:
    return resolve_request(
        options,
        request_id="r1",
        fallback_seed=7,
        spec=SPEC,
        codec=CODEC if with_codec else None,
        max_loops=max_loops,
        initial_state=InitialState.ZEROS,
    )


def test_what_was_left_open_is_decided() -> None:
    request = _resolve(RequestOptions(prompt="hi"))
    assert request.prompt_ids == tuple(b"hi")
    expected = SamplingParams(seed=7, loops=4, stop_ids=SPEC.stop_ids, initial_state=InitialState.ZEROS)
    assert request.params == expected
    assert (request.request_id, request.attempt, request.generated_ids) == ("r1", 1, ())


def test_what_was_asked_for_is_kept() -> None:
    options = RequestOptions(
        prompt=(1, 2), seed=0, loops=9, initial_state=InitialState.NOISE, stop_token_ids=(5, 5, 300), ignore_eos=True
    )
    params = _resolve(dataclasses.replace(options, delivered_token_ids=(8,))).params
    assert (params.seed, params.loops, params.initial_state) == (0, 9, InitialState.NOISE)
    assert params.stop_ids == (5, 300)


def test_own_stop_ids_come_with_the_requests() -> None:
    assert _resolve(RequestOptions(prompt=(1,), stop_token_ids=(5,))).params.stop_ids == tuple(
        sorted({5, *SPEC.stop_ids})
    )


def test_the_default_depth_stays_within_what_is_laid_out() -> None:
    assert _resolve(RequestOptions(prompt=(1,)), max_loops=2).params.loops == 2


def test_messages_go_through_the_template() -> None:
    assert CODEC is not None
    messages = (("user", "hi"),)
    assert _resolve(RequestOptions(prompt=Chat(messages))).prompt_ids == tuple(
        CODEC.encode(CODEC.render_chat(messages))
    )
    with pytest.raises(InvalidRequest, match="messages is empty"):
        _resolve(RequestOptions(prompt=Chat(())))


@pytest.mark.parametrize("options", [RequestOptions(prompt="x"), RequestOptions(prompt=(1,), stop=("x",))])
def test_text_needs_a_tokenizer(options: RequestOptions) -> None:
    with pytest.raises(NoTokenizer, match=r"no tokenizer|has none"):
        _resolve(options, with_codec=False)


class NeverEncodes(TextCodec):
    """Fails where a prompt is encoded before its size is known to be possible."""

    def __init__(self, codec: TextCodec) -> None:
        self.__dict__ |= codec.__dict__

    def encode(self, text: str) -> list[int]:
        raise AssertionError("encoded")


@pytest.mark.parametrize(
    "prompt", ["x" * 600_000, (1,) * 2049, Chat((("user", "x" * 600_000),)), Chat((("user", "x"),) * 50_000)]
)
def test_what_can_never_fit_is_refused_before_it_is_encoded(prompt: str | tuple[int, ...] | Chat) -> None:
    assert CODEC is not None
    with pytest.raises(RequestTooLarge, match=r"has \d+ (bytes|token ids); the model's context.* 2048"):
        resolve_request(
            RequestOptions(prompt=prompt),
            request_id="r1",
            fallback_seed=7,
            spec=SPEC,
            codec=NeverEncodes(CODEC),
            max_loops=4,
        )


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, 86_401.0, float("inf"), float("nan")])
def test_a_deadline_is_bounded_as_the_configurations_is(deadline_s: float) -> None:
    with pytest.raises(InvalidRequest, match=rf"deadline_s is {deadline_s}; allowed: above 0, at most 86400"):
        check_deadline_s(deadline_s)
    check_deadline_s(86_400.0)


@pytest.mark.parametrize(
    ("model", "exit_gate", "text"),
    [
        ("tiny-ouro", False, "the setting model.exit_gate is off"),
        ("tiny-huginn", True, "family huginn has no exit gate"),
        ("tiny-huginn", False, "family huginn has no exit gate"),
    ],
)
def test_exit_probabilities_that_nobody_computes_are_refused(model: str, exit_gate: bool, text: str) -> None:
    def resolve(asks: bool) -> Request:
        return resolve_request(
            RequestOptions(prompt=(1, 2), exit_probabilities=asks),
            request_id="r1",
            fallback_seed=7,
            spec=load_model_spec(TINY.parent / model),
            codec=None,
            max_loops=4,
            exit_gate=exit_gate,
        )

    with pytest.raises(InvalidRequest, match=text):
        resolve(True)
    assert not resolve(False).params.exit_probabilities


def test_exit_probabilities_are_asked_for_where_the_gate_is_evaluated() -> None:
    options = RequestOptions(prompt=(1, 2), exit_probabilities=True)
    request = resolve_request(
        options, request_id="r1", fallback_seed=7, spec=SPEC, codec=None, max_loops=4, exit_gate=True
    )
    assert request.params.exit_probabilities
