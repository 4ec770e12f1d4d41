"""Requests of every kind of noise on equal tokens, through one scheduler: blocks are found by requests of the same kind
and by no others, and a request whose noise is its own neither finds nor leaves any. The coordinator, which hears of
blocks by their names alone, comes to the same."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.prefixes import PrefixTable, RequestPrefixes
from loopline.identity import Fingerprint, WorkerId
from loopline.kv.ledger import Ledger
from loopline.messages import PrefixReport
from loopline.model_spec import load_model_spec
from loopline.noise_key import NoiseKey, noise_fields
from loopline.request import InitialState, Request
from loopline.sched.policy import UnifiedPolicy
from loopline.sched.scheduler import Scheduler
from loopline.settings import SchedulerSettings
from loopline.worker.prefix_reporter import PrefixReporter
from tests.support.golden import MODELS
from tests.support.scheduling import BLOCK_SIZE, ScriptedEngine, request

EXAMPLES = 500 if os.environ.get("LOOPLINE_SOAK") == "1" else 60
WORKER = WorkerId("uuid", 1)
OURO, HUGINN = load_model_spec(MODELS / "tiny-ouro"), load_model_spec(MODELS / "tiny-huginn")
GROUPS = {
    "by request": noise_fields(HUGINN, NoiseKey.REQUEST, 0),
    "by position": noise_fields(HUGINN, NoiseKey.POSITION, 5),
    "by position, another seed": noise_fields(HUGINN, NoiseKey.POSITION, 6),
    "without noise": noise_fields(OURO, NoiseKey.POSITION, 5),
}
ASKED = st.tuples(
    st.sampled_from(InitialState),
    st.integers(1, 22),  # prompt tokens: all prompts are beginnings of one text
    st.integers(1, 9),  # most tokens
    st.sampled_from([1, 2]),  # depth
    st.sampled_from([0, 1, 2**64 - 1]),  # seed
)


def kind_of(group: str, one: Request) -> object:
    """Requests of one kind have equal KV where tokens are equal; None: of no other's. Said again in plain words."""
    if group == "without noise":
        return "nothing", one.params.loops
    if one.params.initial_state is InitialState.ZEROS:
        return "zeros", one.params.loops
    return None if group == "by request" else (group, one.params.loops)


@pytest.mark.parametrize("group", GROUPS)
@settings(max_examples=EXAMPLES)
@given(asked=st.lists(ASKED, min_size=1, max_size=12))
def test_a_request_finds_what_requests_of_its_kind_have_left_and_nothing_else(
    group: str, asked: list[tuple[InitialState, int, int, int, int]]
) -> None:
    fingerprint = Fingerprint((("weights", "w"), *GROUPS[group]))
    ledger = Ledger(1024, BLOCK_SIZE)  # nothing is evicted
    scheduler = Scheduler(ledger, SchedulerSettings(max_running=4, chunk_tokens=8), UnifiedPolicy(), fingerprint)
    coordinator = _Coordinator(ledger, fingerprint)
    written: dict[object, list[tuple[int, ...]]] = {}  # by kind: tokens of whole blocks that were written
    owner: dict[int, object] = {}  # block -> kind
    for number, (state, prompt, most, loops, seed) in enumerate(asked):
        one = request(f"r{number}", prompt, most, loops, seed=seed, initial_state=state, stop_ids=())
        kind, num_cached = kind_of(group, one), ledger.counts().cached
        found = scheduler.find_cached(one)
        earlier = written.get(kind, []) if kind is not None else []
        assert len(found) == max((_shared_blocks(one.prompt_ids, other) for other in earlier), default=0)
        assert all(owner[block] == kind for block in found), "a block of another kind"
        tokens = _run(scheduler, one)
        if kind is None:
            assert ledger.counts().cached == num_cached, "noise of the request's own has left blocks"
        else:
            written.setdefault(kind, []).append(tokens[: (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE])
            longer = Request(request_id="look", prompt_ids=tokens, params=one.params)
            for block in scheduler.find_cached(longer):
                assert owner.setdefault(block, kind) == kind
        assert coordinator.num_cached(one) == len(scheduler.find_cached(one))
        ledger.audit()


def _shared_blocks(prompt: tuple[int, ...], written: tuple[int, ...]) -> int:
    blocks = min(len(prompt), len(written)) // BLOCK_SIZE
    return next(
        count for count in range(blocks, -1, -1) if prompt[: count * BLOCK_SIZE] == written[: count * BLOCK_SIZE]
    )


def _run(scheduler: Scheduler, one: Request) -> tuple[int, ...]:
    """All tokens that a request has in the end."""
    assert scheduler.submit(one) is None
    engine, tokens = ScriptedEngine(scheduler, steps_ahead=0), list(one.prompt_ids)
    while (outcome := engine.step()) is not None:
        tokens += [row.token_id for row in outcome.rows if row.token_id is not None]
    return tuple(tokens)


class _Coordinator:
    """What it knows of the worker, by the worker's reports."""

    def __init__(self, ledger: Ledger, group: Fingerprint) -> None:
        self._group, self._table, self._now_s = group, PrefixTable(), 0.0
        self._table.joined(WORKER, ledger.total_blocks, 0.0)
        self._reporter = PrefixReporter(ledger.prefix, self._take)
        self._reporter.ask()

    def _take(self, report: PrefixReport) -> None:
        assert not self._table.take(WORKER, report, self._now_s)

    def num_cached(self, one: Request) -> int:
        self._now_s += 1.0
        self._reporter.maybe_report(self._now_s, busy=False)
        return self._table.num_cached(WORKER, RequestPrefixes().digests(one, self._group, BLOCK_SIZE))
