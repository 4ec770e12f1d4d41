"""The nine pairs of what a prefill and a decode worker have cached of a prompt, with the prefill worker fetching what
the decode worker has and it has not: the tokens of a run without any cache, fetched is that much and pushed only the
rest, lent blocks keep their bytes, and every block is free or cached again."""

import itertools
from dataclasses import dataclass

import pytest
import torch

from loopline.engine.engine import Engine
from loopline.engine.local import LocalEngine
from loopline.messages import HandoffStats, Prefilled
from tests.property.test_worker_pair import Script
from tests.support.families import asking
from tests.support.pair import BLOCK_SIZE, Pair
from tests.unit.worker.clocks import OwnClock

NUMBERS = itertools.count()
MOST_BLOCKS = 4
WARM = (0, 1, MOST_BLOCKS)
MAX_TOKENS = 6


class FetchingScript(Script):
    """Has everything fetched, and keeps what handoffs have cost."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(pair, fetches=True)
        self.stats: list[HandoffStats] = []

    def take(self, message: object) -> None:
        if isinstance(message, Prefilled):
            self.stats.append(message.stats)
        super().take(message)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Asked:
    tokens: list[int | None]
    stats: HandoffStats


def ask(prefill: Engine, decode: Engine, prompt: tuple[int, ...], max_tokens: int, *, verify: bool = False) -> Asked:
    """Send one request through a fresh pair of these engines."""
    pair = Pair(prefill, decode, name=f"fetch-pair{next(NUMBERS)}", clock=OwnClock(), verify=verify)
    script, name = FetchingScript(pair), f"r{next(NUMBERS)}"
    one = asking(name, prompt, max_tokens)
    lent = decode.scheduler.find_cached(one)
    before = decode.arena.tensor[lent].clone()
    script.send(one)
    script.settle()
    assert torch.equal(decode.arena.tensor[lent], before), "a lent block was written"
    assert not script.failed
    pair.audit()
    assert pair.decode.handoffs() == pair.prefill.handoffs() == ()
    for engine in (prefill, decode):
        counts = engine.ledger.counts()
        assert counts.free + counts.cached == counts.total, counts
    pair.close()
    rows, (stats,) = script.tokens[name], script.stats
    return Asked([rows[position].token_id for position in sorted(rows)], stats)


@pytest.mark.parametrize("verify", [False, True], ids=["plain", "verified"])
@pytest.mark.parametrize("length", [BLOCK_SIZE * MOST_BLOCKS, BLOCK_SIZE * MOST_BLOCKS + 3], ids=["whole", "partial"])
@pytest.mark.parametrize("in_decode", WARM)
@pytest.mark.parametrize("in_prefill", WARM)
def test_caches_of_any_depth_on_both_sides_change_no_token(
    engines: tuple[Engine, Engine, Engine],
    cold: LocalEngine,
    in_prefill: int,
    in_decode: int,
    length: int,
    verify: bool,
) -> None:
    prefill, decode, other = engines
    start = (in_prefill, in_decode, length, int(verify), 77)  # of a text of its own
    prompt = (*start, *((11 * i) % 250 for i in range(length - len(start))))
    if in_decode:
        ask(other, decode, prompt[: in_decode * BLOCK_SIZE], max_tokens=2)
    if in_prefill:
        ask(prefill, decode, prompt[: in_prefill * BLOCK_SIZE], max_tokens=1)
    asked = ask(prefill, decode, prompt, MAX_TOKENS, verify=verify)
    alone = cold.generate(asking("alone", prompt, MAX_TOKENS))
    assert asked.tokens == [row.token_id for row in alone]
    lendable = min(in_decode, (length - 1) // BLOCK_SIZE)  # the block of the last token always comes anew
    block_bytes = decode.layout.block_bytes
    assert asked.stats.fetched_bytes == max(0, lendable - in_prefill) * block_bytes
    assert asked.stats.cached_tokens == max(in_prefill, lendable) * BLOCK_SIZE
    assert asked.stats.num_bytes == (-(-length // BLOCK_SIZE) - lendable) * block_bytes


def test_turns_of_a_conversation_move_what_is_new(engines: tuple[Engine, Engine, Engine], cold: LocalEngine) -> None:
    """Each turn adds two blocks to a conversation; answers are known to the decode worker alone, until they are
    fetched."""
    prefill, decode, _ = engines
    block_bytes, new_tokens, answer_tokens = decode.layout.block_bytes, 5, 3
    prompt = (203, *((13 * i) % 250 for i in range(4 * BLOCK_SIZE)))
    for turn in range(4):
        asked = ask(prefill, decode, prompt, answer_tokens)
        alone = cold.generate(asking("alone", prompt, answer_tokens))
        assert asked.tokens == [row.token_id for row in alone]
        if turn:
            assert asked.stats.cached_tokens >= len(prompt) - new_tokens - answer_tokens - BLOCK_SIZE
            assert asked.stats.num_bytes + asked.stats.fetched_bytes <= 5 * block_bytes, "more than the turn's own"
        prompt += tuple(token for token in asked.tokens if token is not None)
        prompt += tuple((29 * turn + 7 * i) % 250 for i in range(new_tokens))
