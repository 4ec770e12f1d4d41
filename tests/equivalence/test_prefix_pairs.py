"""Requests at workers whose caches know different parts of a prompt, with real engines and real copies, handed off or
prefilled by the decode worker itself: the tokens of a run without any cache, only what the decode worker lacks is
pushed or computed there, shared blocks keep their bytes, and every block is free or cached again. Of Ouro, and of
Huginn with noise keyed by position; each request has a seed of its own."""

import itertools
from dataclasses import dataclass

import pytest
import torch

from loopline.engine.engine import Engine
from loopline.engine.local import LocalEngine
from loopline.messages import HandoffStats, Prefilled, Reserved, StartLocalPrefill
from loopline.sched.plan import ChunkDone
from tests.property.test_worker_pair import Script
from tests.support.families import asking
from tests.support.pair import BLOCK_SIZE, Pair
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


@dataclass(frozen=True)
class Asked:
    """What one request has given: its tokens, and prompt tokens that either worker had cached."""

    tokens: list[int | None]
    in_prefill: int
    in_decode: int
    pushed_bytes: int = 0


def ask(prefill: Engine, decode: Engine, prompt: tuple[int, ...], max_tokens: int, *, is_local: bool = False) -> Asked:
    """Send one request through a fresh pair of these engines, by the prefill worker or not."""
    pair = WatchedPair(prefill, decode)
    script = RememberingScript(pair, is_local)
    name = f"r{next(NUMBERS)}"
    one = asking(name, prompt, max_tokens)
    shared = decode.scheduler.find_cached(one)
    before = decode.arena.tensor[shared].clone()
    script.send(one)
    script.settle()
    assert torch.equal(decode.arena.tensor[shared], before), "a shared block was written"
    assert not script.failed
    (cached,) = script.cached
    computing = pair.decode_chunks if is_local else pair.prefill_chunks
    assert computing[-1].num_computed == len(prompt)
    idle = pair.prefill_chunks if is_local else pair.decode_chunks
    assert idle == [], "both workers have computed of the prompt"
    if is_local:
        assert not script.stats and {chunk.num_cached for chunk in computing} == {cached}
    else:
        (stats,) = script.stats
        assert stats.num_bytes == (-(-len(prompt) // BLOCK_SIZE) - cached // BLOCK_SIZE) * decode.layout.block_bytes
    pair.audit()
    for engine in (prefill, decode):
        counts = engine.ledger.counts()
        assert counts.free + counts.cached == counts.total, counts
    pair.close()
    rows = script.tokens[name]
    in_prefill, num_bytes = (script.stats[0].cached_tokens, script.stats[0].num_bytes) if script.stats else (0, 0)
    return Asked([rows[position].token_id for position in sorted(rows)], in_prefill, cached, num_bytes)


def alone(cold: LocalEngine, prompt: tuple[int, ...], max_tokens: int) -> list[int | None]:
    return [row.token_id for row in cold.generate(asking("alone", prompt, max_tokens))]


class RememberingScript(Script):
    """A coordinator that keeps what handoffs have cost, and what decode workers had of their prompts."""

    def __init__(self, pair: Pair, is_local: bool) -> None:
        super().__init__(pair)
        self._is_local = is_local
        self.stats: list[HandoffStats] = []
        self.cached: list[int] = []

    def take(self, message: object) -> None:
        if isinstance(message, Prefilled):
            self.stats.append(message.stats)
        if isinstance(message, Reserved):
            self.cached.append(message.cached_tokens)
            if self._is_local:
                self.to_decode.append(StartLocalPrefill(message.key))
                return
        super().take(message)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_local", [False, True], ids=["handed_off", "local"])
@pytest.mark.parametrize("length", [BLOCK_SIZE * MOST_BLOCKS, BLOCK_SIZE * MOST_BLOCKS + 3], ids=["whole", "partial"])
@pytest.mark.parametrize("in_decode", WARM)
@pytest.mark.parametrize("in_prefill", WARM)
def test_caches_of_any_depth_on_both_sides_change_no_token(
    engines: tuple[Engine, Engine, Engine],
    cold: LocalEngine,
    in_prefill: int,
    in_decode: int,
    length: int,
    is_local: bool,
) -> None:
    prefill, decode, other = engines
    start = (in_prefill, in_decode, length, int(is_local))  # of a text of its own
    prompt = (*start, *((11 * i) % 250 for i in range(length - len(start))))
    if in_decode:
        ask(other, decode, prompt[: in_decode * BLOCK_SIZE], max_tokens=2)
    if in_prefill:
        ask(prefill, decode, prompt[: in_prefill * BLOCK_SIZE], max_tokens=1)
    asked = ask(prefill, decode, prompt, max_tokens=6, is_local=is_local)
    assert asked.tokens == alone(cold, prompt, 6)
    assert asked.in_prefill == (0 if is_local else in_prefill * BLOCK_SIZE)
    assert asked.in_decode == min(in_decode * BLOCK_SIZE, whole_blocks_before_the_last_token(prompt))


def whole_blocks_before_the_last_token(prompt: tuple[int, ...]) -> int:
    """Tokens of a prompt that a decode worker can have: the block of the last one always comes anew."""
    return (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_the_same_prompt_again_is_found_whole_and_its_last_block_moves(engines: tuple[Engine, Engine, Engine]) -> None:
    """Nothing is left to compute but the last token's logits, and the handoff still happens and still ends."""
    prefill, decode, _ = engines
    prompt = (201, *((7 * i) % 250 for i in range(BLOCK_SIZE * MOST_BLOCKS - 1)))
    first = ask(prefill, decode, prompt, max_tokens=5)
    assert first.in_prefill == first.in_decode == 0
    for _ in range(2):
        again = ask(prefill, decode, prompt, max_tokens=5)
        known, last_block = whole_blocks_before_the_last_token(prompt), decode.layout.block_bytes
        assert again == Asked(first.tokens, len(prompt), known, last_block)


@pytest.mark.parametrize("is_local", [False, True], ids=["handed_off", "local"])
def test_a_next_turn_finds_prompt_and_answer_on_the_decode_worker(
    engines: tuple[Engine, Engine, Engine], cold: LocalEngine, is_local: bool
) -> None:
    """The prefill worker never had the answer's KV; the decode worker wrote it and needs none of it pushed."""
    prefill, decode, _ = engines
    prompt = (202, int(is_local), *((13 * i) % 250 for i in range(9)))
    turn = ask(prefill, decode, prompt, max_tokens=11)
    answer = tuple(token for token in turn.tokens if token is not None)
    longer = prompt + answer + (5, 6, 7)
    again = ask(prefill, decode, longer, max_tokens=4, is_local=is_local)
    written = len(prompt) + len(answer) - 1  # the last token of an answer is never computed
    assert again.in_decode == written // BLOCK_SIZE * BLOCK_SIZE
    assert again.in_prefill == (0 if is_local else len(prompt) // BLOCK_SIZE * BLOCK_SIZE)
    assert again.tokens == alone(cold, longer, 4)


def test_what_a_turn_pushes_is_of_its_new_tokens(engines: tuple[Engine, Engine, Engine], cold: LocalEngine) -> None:
    """The conversation grows from turn to turn; what is pushed does not, but for the block in which a turn begins."""
    prefill, decode, _ = engines
    prompt, num_new = (203, *((17 * i) % 250 for i in range(9))), 10
    for turn in range(6):
        asked = ask(prefill, decode, prompt, max_tokens=5)
        assert asked.tokens == alone(cold, prompt, 5)
        pushed = asked.pushed_bytes // decode.layout.block_bytes
        assert asked.pushed_bytes % decode.layout.block_bytes == 0
        assert num_new / BLOCK_SIZE <= pushed < num_new / BLOCK_SIZE + 2
        num_written = len(prompt) + len(asked.tokens) - 1  # of the last token there is no KV
        prompt = (*prompt, *(token for token in asked.tokens if token is not None), turn, 5, 6, 7, 8, 9)
        num_new = len(prompt) - num_written
