"""Handoffs between workers whose caches know different parts of a prompt, with real engines and real copies: the tokens
of a run without any cache, every block free again, and nothing of the prompt computed by the decode worker."""

import itertools
from collections.abc import Iterator

import pytest

from loopline.engine.engine import Engine
from loopline.engine.local import LocalEngine
from loopline.messages import HandoffStats, Prefilled
from loopline.request import Request, SamplingParams
from loopline.sched.plan import ChunkDone
from loopline.settings import EngineSettings
from tests.property.test_worker_pair import Script
from tests.support.golden import GOLDEN
from tests.support.pair import BLOCK_SIZE, Pair, make_engines
from tests.unit.worker.clocks import OwnClock

NUMBERS = itertools.count()
MOST_BLOCKS = 4
WARM = (0, 1, MOST_BLOCKS)


class WatchedPair(Pair):
    """A pair that remembers the chunks of prompts that either side computed."""

    def __init__(self, prefill_engine: Engine, decode_engine: Engine) -> None:
        super().__init__(prefill_engine, decode_engine, name=f"prefix-pair{next(NUMBERS)}", clock=OwnClock())
        self.prefill_chunks: list[ChunkDone] = []
        self.decode_chunks: list[ChunkDone] = []

    def step_prefill(self) -> bool:
        outcome = self.prefill_engine.step()
        if outcome is not None:
            self.prefill_chunks += outcome.chunks
            self.prefill.stepped(outcome)
        return outcome is not None

    def step_decode(self) -> bool:
        outcome = self.decode_engine.step()
        if outcome is not None:
            self.decode_chunks += outcome.chunks
            self.decode.stepped(outcome)
        return outcome is not None


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine, Engine]:
    """A prefill and a decode worker's, and one of another prefill worker that only warms the decode worker."""
    prefill, decode = make_engines(num_blocks=96)
    return prefill, decode, make_engines(num_blocks=96)[0]


@pytest.fixture(scope="module")
def cold() -> Iterator[LocalEngine]:
    settings = EngineSettings(
        model_path=str(GOLDEN / "ouro_fp32"), block_size=BLOCK_SIZE, num_blocks=24, prefix_cache="off"
    )
    engine = LocalEngine(settings)
    yield engine
    engine.close()


def ask(prefill: Engine, decode: Engine, prompt: tuple[int, ...], max_tokens: int) -> tuple[list[int | None], int]:
    """Send one request through a fresh pair of these engines. Returns its tokens and how many of the prompt's tokens
    the prefill worker found."""
    pair = WatchedPair(prefill, decode)
    script = RememberingScript(pair)
    name = f"r{next(NUMBERS)}"
    params = SamplingParams(max_tokens=max_tokens, loops=4)
    script.send(Request(request_id=name, prompt_ids=prompt, params=params))
    script.settle()
    assert not script.failed
    assert pair.decode_chunks == [], "the decode worker has computed a part of the prompt"
    (stats,) = script.stats
    assert pair.prefill_chunks[-1].num_computed == len(prompt)
    assert stats.num_bytes == -(-len(prompt) // BLOCK_SIZE) * decode.layout.block_bytes
    pair.audit()
    for engine in (prefill, decode):
        counts = engine.ledger.counts()
        assert counts.free + counts.cached == counts.total, counts
    pair.close()
    rows = script.tokens[name]
    return [rows[position].token_id for position in sorted(rows)], stats.cached_tokens


class RememberingScript(Script):
    """A coordinator that keeps what handoffs have cost."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(pair)
        self.stats: list[HandoffStats] = []

    def take(self, message: object) -> None:
        if isinstance(message, Prefilled):
            self.stats.append(message.stats)
        super().take(message)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [BLOCK_SIZE * MOST_BLOCKS, BLOCK_SIZE * MOST_BLOCKS + 3], ids=["whole", "partial"])
@pytest.mark.parametrize("in_decode", WARM)
@pytest.mark.parametrize("in_prefill", WARM)
def test_caches_of_any_depth_on_both_sides_change_no_token(
    engines: tuple[Engine, Engine, Engine], cold: LocalEngine, in_prefill: int, in_decode: int, length: int
) -> None:
    prefill, decode, other = engines
    prompt = (in_prefill, in_decode, length, *((11 * i) % 250 for i in range(length - 3)))  # a text of its own
    if in_decode:
        ask(other, decode, prompt[: in_decode * BLOCK_SIZE], max_tokens=2)
    if in_prefill:
        ask(prefill, decode, prompt[: in_prefill * BLOCK_SIZE], max_tokens=1)
    tokens, cached = ask(prefill, decode, prompt, max_tokens=6)
    params = SamplingParams(max_tokens=6, loops=4)
    alone = cold.generate(Request(request_id="alone", prompt_ids=prompt, params=params))
    assert tokens == [row.token_id for row in alone]
    assert cached == in_prefill * BLOCK_SIZE


def test_the_same_prompt_again_is_found_whole_and_moves_whole(
    engines: tuple[Engine, Engine, Engine], cold: LocalEngine
) -> None:
    """Nothing is left to compute but the last token's logits, and the handoff still happens and still ends."""
    prefill, decode, _ = engines
    prompt = (201, *((7 * i) % 250 for i in range(BLOCK_SIZE * MOST_BLOCKS - 1)))
    first, cached = ask(prefill, decode, prompt, max_tokens=5)
    assert cached == 0
    for _ in range(2):
        assert ask(prefill, decode, prompt, max_tokens=5) == (first, len(prompt))
