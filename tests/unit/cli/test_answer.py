"""How an answer is printed: as text while it comes, or as one object, and what the exit status says."""

import json
from collections.abc import Generator
from typing import Any

import pytest
import typer

from loopline.cli.answer import deliver
from loopline.client import Accepted, Chunk, Event, Finished, Token
from loopline.errors import DeadlineExceeded, WorkerLost
from loopline.intake import RequestOptions
from loopline.messages import HandoffStats
from loopline.request import FinishReason, Route, Timing, TokenLogprob, TokenLogprobs, Usage

PLAIN = RequestOptions(prompt="x")
EVERYTHING = RequestOptions(prompt="x", logprobs=1, exit_probabilities=True)
ACCEPTED = Accepted("r1", 5, 3)
TOKENS = Chunk((Token(7, 2, TokenLogprobs(-0.5, (TokenLogprob(7, -0.5),)), (0.25, 0.75)), Token(8, 4)), "hé")


def _finished(reason: FinishReason = FinishReason.LENGTH, *, has_text: bool = True) -> Finished:
    return Finished(
        reason=reason,
        text="!" if has_text else "",
        has_text=has_text,
        usage=Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1),
        timing=Timing(queued_s=0.1, ttft_s=0.2, total_s=0.3),
        route=Route("p0", "d0", prefix_source="recompute"),
        handoff=HandoffStats(1, 1, 10, "tcp", 0.1),
    )


def _events(*items: Event | BaseException) -> Generator[Event, None, None]:
    for item in items:
        if isinstance(item, BaseException):
            raise item
        yield item


def _object(capsys: pytest.CaptureFixture[str], *items: Event | BaseException, status: int = 0) -> dict[str, Any]:
    if status:
        with pytest.raises(typer.Exit) as caught:
            deliver(_events(*items), as_json=True, options=EVERYTHING)
        assert caught.value.exit_code == status
    else:
        deliver(_events(*items), as_json=True, options=EVERYTHING)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_text_comes_as_it_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    deliver(_events(ACCEPTED, TOKENS, _finished()), as_json=False, options=PLAIN)
    assert capsys.readouterr().out == "hé!\n"


def test_without_a_tokenizer_the_ids_are_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    events = _events(ACCEPTED, Chunk(TOKENS.tokens, ""), _finished(has_text=False))
    deliver(events, as_json=False, options=PLAIN)
    assert capsys.readouterr().out == "7,8\n"


def test_the_object_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert _object(capsys, ACCEPTED, TOKENS, _finished()) == {
        "request_id": "r1",
        "seed": 5,
        "token_ids": [7, 8],
        "text": "hé!",
        "finish_reason": "length",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1},
        "timing": {"ttft_s": 0.2, "total_s": 0.3, "queued_s": 0.1},
        "route": {"prefill": "p0", "decode": "d0", "prefix_source": "recompute"},
        "logprobs": [
            {"token_id": 7, "logprob": -0.5, "top": [{"token_id": 7, "logprob": -0.5}]},
            {"token_id": 8, "logprob": None, "top": []},
        ],
        "exit_probabilities": [[0.25, 0.75], []],
    }


def test_the_object_without_a_tokenizer_has_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    record = _object(capsys, ACCEPTED, Chunk(TOKENS.tokens, ""), _finished(has_text=False))
    assert (record["text"], record["token_ids"]) == (None, [7, 8])


@pytest.mark.parametrize(
    ("failure", "reason", "status"),
    [
        (WorkerLost("gone after 2 tokens"), "error", 1),
        (DeadlineExceeded("too late"), "deadline", 1),
        (KeyboardInterrupt(), "cancelled", 130),
    ],
)
def test_a_failure_keeps_what_was_delivered(
    capsys: pytest.CaptureFixture[str], failure: BaseException, reason: str, status: int
) -> None:
    record = _object(capsys, ACCEPTED, TOKENS, failure, status=status)
    assert (record["token_ids"], record["text"], record["finish_reason"]) == ([7, 8], "hé", reason)
    assert record["error"] == (str(failure) or "cancelled")


def test_a_failure_is_said_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        deliver(_events(WorkerLost("gone")), as_json=False, options=PLAIN)
    assert capsys.readouterr() == ("", "error: gone\n")
