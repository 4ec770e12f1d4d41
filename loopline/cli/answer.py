"""Bringing one answer to the terminal, as text while it comes or as one JSON object."""

import json
import sys
from collections.abc import Generator
from typing import Any

import typer

from loopline.client import Completion, Event, Finished, Token
from loopline.errors import DeadlineExceeded, LooplineError
from loopline.intake import RequestOptions
from loopline.request import FinishReason

_INTERRUPTED = 130  # what shells say of a command that Ctrl-C ended


def deliver(events: Generator[Event, None, None], *, as_json: bool, options: RequestOptions) -> None:
    """Print the answer, with what `options` asked for; exit status 1 with the reason on standard error if it failed,
    130 after Ctrl-C."""
    completion, failure, reason, status = Completion(), None, None, 0
    try:
        for event in events:
            completion = completion.after(event)
            if not as_json and not isinstance(event, Finished) and (text := getattr(event, "text", "")):
                sys.stdout.write(text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        failure, reason, status = "cancelled", FinishReason.CANCELLED, _INTERRUPTED
    except DeadlineExceeded as error:
        failure, reason, status = str(error), FinishReason.DEADLINE, 1
    except LooplineError as error:
        failure, reason, status = str(error), FinishReason.ERROR, 1
    finally:
        events.close()
    if as_json:
        sys.stdout.write(json.dumps(answer_record(completion, reason, failure, options)) + "\n")
    else:
        _end_text(completion)
    if failure is not None:
        sys.stderr.write(f"error: {failure}\n")
        raise typer.Exit(status)


def _end_text(completion: Completion) -> None:
    finished = completion.finished
    if finished is not None and not finished.has_text:
        sys.stdout.write(",".join(str(token_id) for token_id in completion.token_ids))
    elif finished is not None:
        sys.stdout.write(finished.text)
    if completion.tokens or finished is not None:
        sys.stdout.write("\n")


def answer_record(
    completion: Completion, reason: FinishReason | None, failure: str | None, options: RequestOptions
) -> dict[str, Any]:
    """The JSON object of one answer. `reason` and `failure` are of an answer that did not end by itself."""
    accepted, finished = completion.accepted, completion.finished
    text = completion.text if finished is not None or completion.text or not completion.tokens else None
    record: dict[str, Any] = {
        "request_id": None if accepted is None else accepted.request_id,
        "seed": None if accepted is None else accepted.seed,
        "token_ids": list(completion.token_ids),
        "text": text,
        "finish_reason": str(reason or completion.finish_reason or FinishReason.ERROR),
        "usage": {
            "prompt_tokens": 0 if accepted is None else accepted.prompt_tokens,
            "completion_tokens": len(completion.tokens),
            "cached_tokens": 0 if finished is None else finished.usage.cached_tokens,
        },
        "timing": _timing(finished),
        "route": {
            "prefill": "" if finished is None else finished.route.prefill,
            "decode": "" if finished is None else finished.route.decode,
            "prefix_source": "" if finished is None else finished.route.prefix_source,
        },
    }
    if options.logprobs is not None:
        record["logprobs"] = [_logprobs(token) for token in completion.tokens]
    if options.exit_probabilities:
        record["exit_probabilities"] = [list(token.exit_probabilities) for token in completion.tokens]
    if failure is not None:
        record["error"] = failure
    return record


def _timing(finished: Finished | None) -> dict[str, float] | None:
    if finished is None:
        return None
    timing = finished.timing
    return {"ttft_s": timing.ttft_s, "total_s": timing.total_s, "queued_s": timing.queued_s}


def _logprobs(token: Token) -> dict[str, Any]:
    found = token.logprobs
    return {
        "token_id": token.id,
        "logprob": None if found is None else found.chosen,
        "top": [] if found is None else [{"token_id": top.token_id, "logprob": top.logprob} for top in found.top],
    }
