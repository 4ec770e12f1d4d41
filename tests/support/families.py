"""One small engine of each kind whose prefixes are shared: Ouro, and Huginn with noise that is keyed by position."""

import itertools

from loopline.request import InitialState, Request, SamplingParams
from loopline.settings import EngineSettings
from tests.support.golden import GOLDEN, MODELS

NUMBERS = itertools.count(1)
FAMILIES = {
    "ouro": EngineSettings(model_path=str(GOLDEN / "ouro_fp32")),
    "huginn": EngineSettings(
        model_path=str(MODELS / "tiny-huginn"), dtype="fp32", noise_key="position", noise_seed=2**64 - 5
    ),
}
LOOPS = 4


def asking(
    name: str,
    prompt: tuple[int, ...],
    max_tokens: int,
    *,
    loops: int = LOOPS,
    logprobs: int | None = None,
    initial_state: InitialState = InitialState.NOISE,
    seed: int | None = None,
) -> Request:
    """A greedy request, so that its seed could change noise alone: one of its own, if none is given."""
    params = SamplingParams(
        max_tokens=max_tokens,
        loops=loops,
        logprobs=logprobs,
        initial_state=initial_state,
        seed=next(NUMBERS) if seed is None else seed,
    )
    return Request(request_id=name, prompt_ids=prompt, params=params)
