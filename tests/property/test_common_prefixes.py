"""Of requests with a common beginning one computes it and the others wait, whichever way they came: queued, or reserved
and then computed here. Every prompt here is a beginning of the longest one.
"""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopline.kv.ledger import Allocation
from loopline.request import Request
from loopline.sched.scheduler import Scheduler
from loopline.settings import SchedulerSettings
from tests.support.scheduling import BLOCK_SIZE, ScriptedEngine, expected_answer, make, request

WAYS = ("submit", "start", "start later")
PROMPTS = st.integers(1, 20)
SCRIPTS = st.lists(st.tuples(st.sampled_from((*WAYS, "step", "step")), PROMPTS), max_size=14)
MOST = 2


class Player:
    """Counts how often each position of a block that may be shared is computed."""

    def __init__(self, steps_ahead: int) -> None:
        chosen = SchedulerSettings(max_running=6, chunk_tokens=4, max_token_loops=48, steps_ahead=steps_ahead)
        self.ledger, self.scheduler = make(chosen, parts=("model",))
        self.engine = ScriptedEngine(self.scheduler, steps_ahead)
        self.reserved: list[Allocation] = []
        self.asked: list[Request] = []
        self.tokens: dict[str, list[int]] = {}
        self.num_seen = 0
        self.computed: Counter[int] = Counter()

    def act(self, action: str, prompt: int) -> None:
        if action == "step":
            self.step()
            return
        if len(self.asked) == 4:  # as many as there are blocks for, so that nothing is evicted
            return
        new = request(f"r{len(self.asked)}", prompt, MOST)
        self.asked.append(new)
        if action == "submit":
            assert self.scheduler.submit(new) is None
            return
        held = self.scheduler.reserve(new)
        assert isinstance(held, Allocation)
        if action == "start":
            self.scheduler.start_reserved(held)
        else:
            self.reserved.append(held)

    def start_all(self) -> None:
        for held in self.reserved:
            self.scheduler.start_reserved(held)
        self.reserved.clear()

    def step(self) -> bool:
        outcome = self.engine.step()
        for plan in self.engine.plans[self.num_seen :]:
            for run in plan.runs:
                num_shared = (self.num_known(run.request_id) - 1) // BLOCK_SIZE * BLOCK_SIZE
                self.computed.update(range(run.first_position, min(run.first_position + run.num_tokens, num_shared)))
        self.num_seen = len(self.engine.plans)
        for row in outcome.rows if outcome is not None else ():
            if row.token_id is not None:
                self.tokens.setdefault(row.request_id, []).append(row.token_id)
        self.ledger.audit()
        return outcome is not None

    def num_known(self, name: str) -> int:
        return next(one.num_known_tokens for one in self.asked if one.request_id == name)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_no_block_of_a_common_beginning_is_computed_twice(steps_ahead: int) -> None:
    @settings(max_examples=100, deadline=None)
    @given(SCRIPTS)
    def run(script: list[tuple[str, int]]) -> None:
        player = Player(steps_ahead)
        for action, prompt in script:
            player.act(action, prompt)
        player.start_all()
        while player.step():
            pass
        assert not player.scheduler.has_work
        assert all(times == 1 for times in player.computed.values()), player.computed
        assert {name: tokens for name, tokens in player.tokens.items() if tokens} == {
            one.request_id: expected_answer(one)[0] for one in player.asked if expected_answer(one)[0]
        }

    run()


def begin(scheduler: Scheduler, way: str, name: str, num_arrived: int = 0) -> None:
    new = request(name, 33, 1)
    if way == "submit":
        assert scheduler.submit(new) is None
        return
    held = scheduler.reserve(new)
    assert isinstance(held, Allocation)
    scheduler.start_reserved(held, num_arrived)


def computed_tokens(engine: ScriptedEngine) -> dict[str, int]:
    while engine.step() is not None:
        pass
    counts: Counter[str] = Counter()
    for plan in engine.plans:
        counts.update({run.request_id: run.num_tokens for run in plan.runs})
    return dict(counts)


@pytest.mark.parametrize("way", ["submit", "start"])
@pytest.mark.parametrize("num_arrived", [0, 4, 12])
def test_who_waits_computes_only_its_own(way: str, num_arrived: int) -> None:
    """`num_arrived`: of the first one's prompt, tokens whose KV another worker has brought."""
    ledger, scheduler = make(SchedulerSettings(max_running=6, chunk_tokens=8), parts=("model",))
    begin(scheduler, "start", "first", num_arrived)
    begin(scheduler, way, "second")
    begin(scheduler, way, "third")
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
    computed = computed_tokens(ScriptedEngine(scheduler, 0))
    assert computed == {"first": 33 - num_arrived, "second": 1, "third": 1}
    ledger.audit()
    assert not ledger.counts().held


@pytest.mark.parametrize("how", ["gone", "lost"])
def test_where_the_first_does_not_come_to_its_end_another_goes_on(how: str) -> None:
    ledger, scheduler = make(SchedulerSettings(max_running=6, chunk_tokens=8), parts=("model",))
    engine = ScriptedEngine(scheduler, 0)
    for name in ("first", "second", "third"):
        begin(scheduler, "start", name)
    engine.step()
    if how == "gone":
        allocation = scheduler.remove("first")
        assert allocation is not None
        ledger.release(allocation)
    else:
        engine.submit()
        (lost,) = engine.commit(fails=True).lost
        ledger.release(lost.allocation)
    computed = computed_tokens(engine)
    assert computed["second"] + computed["third"] == 33 - 8 + 1, "8 tokens were there"
    ledger.audit()
    assert not ledger.counts().held
