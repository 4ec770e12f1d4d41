"""`loopline run`: one answer from an engine in this process, without a cluster."""

import secrets
import time
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

from loopline.cli.answer import deliver
from loopline.cli.options import Deadline, Json, with_request_options
from loopline.client import Accepted, Chunk, Event, Finished, Token
from loopline.errors import DeadlineExceeded, InvalidRequest
from loopline.intake import RequestOptions, check_deadline_s, resolve_request
from loopline.messages import TokenRow
from loopline.model_spec import ModelSpec, load_model_spec
from loopline.noise_key import NoiseKey
from loopline.request import FinishReason, PrefixSource, Request, Route, Timing, Usage
from loopline.settings import EngineSettings
from loopline.text import TextCodec, TextStream, load_text

_ROUTE = "local"


@with_request_options
def run(
    *,
    model_dir: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="Checkpoint folder.", show_default=False)],
    options: RequestOptions,
    dtype: Annotated[Literal["auto", "fp32", "bf16"], typer.Option(help="auto: the checkpoint's own.")] = "auto",
    device: Annotated[str, typer.Option(metavar="cpu|cuda|cuda:N", help="Where to compute.")] = "cpu",
    noise_key: Annotated[NoiseKey, typer.Option(help="As model.noise_key of a cluster.")] = NoiseKey.REQUEST,
    noise_seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="As model.noise_seed of a cluster.")] = 0,
    deadline: Deadline = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt with a model loaded into this process."""
    spec, codec = load_model_spec(model_dir), load_text(model_dir)
    if options.loops is not None and options.loops < 1:
        raise InvalidRequest(f"loops is {options.loops}; allowed: 1 and above")
    if deadline is not None:
        check_deadline_s(deadline)
    max_loops = max(spec.default_loops, options.loops or 1)
    request = resolve_request(
        options,
        request_id=str(uuid.uuid4()),
        fallback_seed=secrets.randbits(64),
        spec=spec,
        codec=codec,
        max_loops=max_loops,
        exit_gate=True,
    )
    request.params.check(spec.vocab_size)
    settings = EngineSettings(
        model_path=str(model_dir),
        device=device,
        dtype=dtype,
        max_loops=max_loops,
        num_blocks=_num_blocks(request, spec),
        exit_gate=options.exit_probabilities,
        noise_key=noise_key,
        noise_seed=noise_seed,
    )
    events = _events(settings, request, codec, deadline)
    deliver(events, as_json=as_json, options=options)


def _num_blocks(request: Request, spec: ModelSpec) -> int:
    """Blocks for this one request; a request past the context is refused by the engine, with the numbers."""
    block_size = EngineSettings(model_path="").block_size
    return -(-min(max(request.max_kv_tokens, 1), spec.context_tokens) // block_size)


def _events(
    settings: EngineSettings, request: Request, codec: TextCodec | None, deadline_s: float | None
) -> Generator[Event, None, None]:
    """The events that a cluster would send."""
    from loopline.engine.local import LocalEngine  # loads torch: only when a model is really run

    engine = LocalEngine(settings)
    try:
        start_s = time.monotonic()
        rows = engine.generate(request)
        yield Accepted(request.request_id, request.params.seed, len(request.prompt_ids))
        text = None if codec is None else codec.decoder(request.params.stop)
        yield from _answer(rows, text, len(request.prompt_ids), start_s, deadline_s)
    finally:
        engine.close()


def _answer(
    rows: Iterator[TokenRow], text: TextStream | None, num_prompt: int, start_s: float, deadline_s: float | None
) -> Iterator[Event]:
    ttft_s, count, reason = 0.0, 0, FinishReason.LENGTH
    try:
        for row in rows:
            now_s = time.monotonic() - start_s
            if row.token_id is not None:
                count += 1
                ttft_s = ttft_s or now_s
                token = Token(row.token_id, row.depth, row.logprobs, row.exit_probabilities)
                yield Chunk((token,), "" if text is None else text.push((row.token_id,)))
            reason = row.finish or reason
            if text is not None and text.stopped:
                reason = FinishReason.STOP
                break
            if deadline_s is not None and now_s > deadline_s and row.finish is None:
                raise DeadlineExceeded(f"the deadline of {deadline_s:g} s passed after {count} tokens")
    finally:
        close = getattr(rows, "close", None)
        if close is not None:
            close()
    yield Finished(
        reason=reason,
        text="" if text is None else text.finish(),
        has_text=text is not None,
        usage=Usage(prompt_tokens=num_prompt, completion_tokens=count),
        timing=Timing(ttft_s=ttft_s, total_s=time.monotonic() - start_s),
        route=Route(_ROUTE, _ROUTE, prefix_source=PrefixSource.LOCAL),
        handoff=None,
    )
