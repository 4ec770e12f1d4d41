"""The scheduler by example: roles, preemption, passing, shared prefixes, the prompt's share of a step."""

import pytest

from loopline.errors import InvariantBroken
from loopline.identity import Cause
from loopline.kv.digests import BlockDigests
from loopline.kv.ledger import Allocation, Ledger
from loopline.messages import TokenRow
from loopline.request import FinishReason, Request
from loopline.sched.entry import Entry
from loopline.sched.plan import NOT_FINITE, StepPlan, StepResult
from loopline.sched.scheduler import Scheduler
from loopline.settings import SchedulerSettings
from tests.support.scheduling import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    HoldPolicy,
    expected_answer,
    make,
    request,
    run_scripted,
    scripted_token,
)


def test_two_worst_cases_fit_and_six_long_answers_all_finish() -> None:
    ledger, scheduler = make()
    worst = NUM_BLOCKS * BLOCK_SIZE // 2
    answers: dict[str, list[int]] = {}
    wanted = [request(f"long{n}", 8, worst - 8, 1) for n in range(6)]
    for one in wanted:
        assert scheduler.submit(one) is None
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None, "deadlock"
        assert scheduler.num_running <= 2
        for row in scheduler.commit(plan, run_scripted(plan)).rows:
            if row.token_id is not None:
                answers.setdefault(row.request_id, []).append(row.token_id)
    assert answers == {one.request_id: expected_answer(one)[0] for one in wanted if expected_answer(one)[0]}
    ledger.audit()


def test_a_prefill_role_holds_its_blocks_after_the_first_token() -> None:
    ledger, scheduler = make(policy=HoldPolicy())
    assert scheduler.submit(request("p", 10, 5)) is None
    chunks = []
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        outcome = scheduler.commit(plan, run_scripted(plan))
        chunks += [(chunk.num_computed, chunk.is_last) for chunk in outcome.chunks]
    assert chunks == [(8, False), (10, True)]
    assert ledger.counts().held == 3
    assert scheduler.plan() is None
    allocation = scheduler.remove("p")
    assert allocation is not None
    ledger.release(allocation)
    assert ledger.counts().free == NUM_BLOCKS


def reserve(scheduler: Scheduler, one: Request) -> Allocation:
    allocation = scheduler.reserve(one)
    assert isinstance(allocation, Allocation)
    return allocation


def test_an_activated_request_goes_on_from_the_first_token() -> None:
    ledger, scheduler = make()
    one = request("d", 9, 6)
    allocation = reserve(scheduler, one)
    first = TokenRow("d", 1, 9, scripted_token("d", 9), 2)
    rows = [scheduler.activate(allocation, first)]
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        assert not plan.runs and plan.num_decode_rows == 1, "nothing of the prompt is computed again"
        rows += scheduler.commit(plan, run_scripted(plan)).rows
    assert [row.token_id for row in rows if row.token_id is not None] == expected_answer(one)[0]
    ledger.audit()


def test_reservations_are_refused_by_room_and_by_size() -> None:
    _, scheduler = make(SchedulerSettings(max_running=2, chunk_tokens=8))
    assert scheduler.reserve(request("x", 90, 40)) is Cause.TOO_LARGE
    reserve(scheduler, request("a", 8, 8))
    kept = reserve(scheduler, request("b", 8, 8))
    assert scheduler.reserve(request("c", 8, 8)) is Cause.NO_ROOM
    scheduler.unreserve(kept)
    assert scheduler.num_running == 1


def test_a_request_that_ended_cannot_be_activated() -> None:
    _, scheduler = make()
    allocation = reserve(scheduler, request("d", 9, 6))
    ended = TokenRow("d", 1, 9, None, 2, FinishReason.STOP)
    with pytest.raises(InvariantBroken):
        scheduler.activate(allocation, ended)


def test_one_plan_at_a_time() -> None:
    _, scheduler = make()
    scheduler.submit(request("a", 8, 8))
    plan = scheduler.plan()
    assert plan is not None
    with pytest.raises(InvariantBroken):
        scheduler.plan()
    scheduler.commit(plan, run_scripted(plan))
    with pytest.raises(InvariantBroken):
        scheduler.commit(plan, run_scripted(plan))


def test_logits_that_are_not_finite_cost_one_request() -> None:
    ledger, scheduler = make()
    scheduler.submit(request("a", 4, 8))
    scheduler.submit(request("b", 4, 8))
    plan = scheduler.plan()
    assert plan is not None
    good = run_scripted(plan)
    bad = StepResult(plan.step, [NOT_FINITE, *good.token_ids[1:]])
    outcome = scheduler.commit(plan, bad)
    assert [lost.request_id for lost in outcome.lost] == ["a"]
    ledger.release(outcome.lost[0].allocation)
    ledger.audit()
    assert scheduler.has_work


def drain(scheduler: Scheduler) -> dict[str, list[int | None]]:
    answers: dict[str, list[int | None]] = {}
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None, "deadlock"
        for row in scheduler.commit(plan, run_scripted(plan)).rows:
            answers.setdefault(row.request_id, []).append(row.token_id)
    return answers


def test_preemption_takes_the_youngest_and_never_a_reservation() -> None:
    ledger, scheduler = make(SchedulerSettings(max_running=6, chunk_tokens=64, growth_share=0.0))
    kept = reserve(scheduler, request("reserved", 16, 16))
    names = ("oldest", "middle", "youngest")
    for name in names:
        scheduler.submit(request(name, 16, 60))
    reserved_blocks = ledger.block_ids(kept)
    last_step: dict[str, int] = {}
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        last_step.update(dict.fromkeys(plan.request_ids, plan.step))
        scheduler.commit(plan, run_scripted(plan))
        assert ledger.block_ids(kept) == reserved_blocks
        ledger.audit()
    assert scheduler.num_preempted > 0
    ended = [name for name in names if len(expected_answer(request(name, 16, 60))[0]) > 30]
    assert [last_step[name] for name in ended] == sorted(last_step[name] for name in ended)


def test_younger_ones_pass_a_blocked_request_a_bounded_number_of_times() -> None:
    _, scheduler = make(SchedulerSettings(max_running=6, chunk_tokens=64, max_passes=3))
    scheduler.submit(request("running", 40, 20))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.submit(request("long", 60, 20))
    for n in range(8):
        scheduler.submit(request(f"short{n}", 4, 1))
    order: list[str] = []
    while scheduler.has_work:
        order += [name for name in plan.request_ids if name not in order]
        scheduler.commit(plan, run_scripted(plan))
        plan = scheduler.plan() or plan
    passed = [name for name in order[: order.index("long")] if name.startswith("short")]
    assert passed == ["short0", "short1", "short2"]


def test_a_common_prefix_is_computed_once() -> None:
    ledger, scheduler = make(SchedulerSettings(max_running=6, chunk_tokens=8), parts=("model",))
    for name in ("first", "second", "third"):
        scheduler.submit(request(name, 33, 1))
    computed: dict[str, int] = {}
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        for run in plan.runs:
            computed[run.request_id] = computed.get(run.request_id, 0) + run.num_tokens
        scheduler.commit(plan, run_scripted(plan))
    assert computed == {"first": 33, "second": 1, "third": 1}
    ledger.audit()


@pytest.mark.parametrize(
    ("length", "hit", "computed"), [(3, 0, 3), (4, 4, 1), (5, 4, 1), (8, 8, 1), (9, 8, 1), (11, 8, 3)]
)
def test_a_second_request_computes_what_is_missing(length: int, hit: int, computed: int) -> None:
    """Hits are whole blocks; a full hit computes exactly one token, and writes nothing."""
    ledger, scheduler = make(parts=("model",))
    scheduler.submit(request("warm", length, 1))
    drain(scheduler)
    scheduler.submit(request("hit", length, 1))
    plan = scheduler.plan()
    assert plan is not None
    (run,) = plan.runs
    assert (run.first_position, run.num_tokens) == (length - computed, computed)
    assert run.writes == (hit < length)
    scheduler.commit(plan, run_scripted(plan))
    ledger.audit()


def test_digests_are_computed_once_however_often_a_request_is_tried() -> None:
    _, scheduler = make(SchedulerSettings(max_running=6, chunk_tokens=8), parts=("model",))
    scheduler.submit(request("blocker", 80, 10))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.submit(request("waits", 41, 30))
    entry = next(scheduler._admission._waiting.first(1))
    assert entry.digests is not None
    before = entry.digests.num_hashed
    for _ in range(12):
        scheduler.commit(plan, run_scripted(plan))
        plan = scheduler.plan()
        assert plan is not None
    assert before == entry.digests.num_hashed == 10


def test_prompt_tokens_keep_to_their_share_while_others_decode() -> None:
    _, scheduler = make(SchedulerSettings(max_running=6, chunk_tokens=64, prefill_tokens_per_loop=6))
    scheduler.submit(request("decodes", 4, 30))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.submit(request("long", 50, 1))
    chunks = []
    while scheduler.has_work:
        scheduler.commit(plan, run_scripted(plan))
        plan = scheduler.plan() or plan
        chunks += [run.num_tokens for run in plan.runs if plan.num_decode_rows]
    assert chunks and max(chunks) <= 6


def test_a_step_that_lags_keeps_freed_blocks_back() -> None:
    """The engine is two steps behind: blocks of a removed request wait for the step that may write them."""
    ledger = Ledger(4, BLOCK_SIZE)
    first = ledger.reserve(8, 8)
    assert first is not None
    ledger.begin_run(first, 0, 8, 1, step=3)
    ledger.release(first)
    other = ledger.reserve(8, 8)
    assert other is not None
    assert ledger.reserve(4, 4) is None
    for step in (1, 2):
        ledger.step_done(step)
        assert ledger.reserve(4, 4) is None
    ledger.step_done(3)
    assert ledger.reserve(8, 8) is not None
    ledger.audit()


def test_what_leaves_or_comes_while_a_step_runs_changes_no_other_answer() -> None:
    """One decoding request is removed and another activated between a plan and its commit."""
    ledger, scheduler = make()
    long_ones = (name for name in map(str, range(99)) if len(expected_answer(request(name, 4, 12))[0]) == 12)
    names = [next(long_ones) for _ in range(3)]
    for name in names:
        scheduler.submit(request(name, 4, 12))
    answers: dict[str, list[int | None]] = {name: [] for name in (*names, "late")}

    def commit(plan: StepPlan) -> None:
        for row in scheduler.commit(plan, run_scripted(plan)).rows:
            answers[row.request_id].append(row.token_id)
        ledger.audit()

    for _ in range(2):
        plan = scheduler.plan()
        assert plan is not None
        commit(plan)
    plan = scheduler.plan()
    assert plan is not None and plan.num_decode_rows == 3
    removed = scheduler.remove(names[1])
    assert removed is not None
    ledger.release(removed)
    held = reserve(scheduler, request("late", 9, 6))
    first = scheduler.activate(held, TokenRow("late", 1, 9, scripted_token("late", 9), 2))
    answers["late"].append(first.token_id)
    cut = list(answers[names[1]])
    while plan is not None:
        commit(plan)
        plan = scheduler.plan()
    assert answers[names[1]] == cut
    for one in (request(names[0], 4, 12), request(names[2], 4, 12), request("late", 9, 6)):
        assert [token for token in answers[one.request_id] if token is not None] == expected_answer(one)[0]
    assert ledger.counts().free == NUM_BLOCKS


def test_a_reserved_prompt_that_is_computed_here_takes_its_share_and_what_is_cached_for_granted() -> None:
    settings = SchedulerSettings(max_running=6, chunk_tokens=64, prefill_tokens_per_loop=6)
    ledger, scheduler = make(settings, parts=("model",))
    first = request("a", 14, 20, stop_ids=())
    scheduler.activate(reserve(scheduler, first), TokenRow("a", 1, 14, scripted_token("a", 14), 2))
    second = request("b", 34, 3, stop_ids=())
    allocation = reserve(scheduler, second)
    assert ledger.written_tokens(allocation, 2) == 3 * BLOCK_SIZE  # whole blocks of the common beginning
    scheduler.start_reserved(allocation)
    rows, sizes = [], []
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        sizes += [(run.first_position, run.num_tokens) for run in plan.runs]
        rows += scheduler.commit(plan, run_scripted(plan)).rows
    assert sizes[0][0] == 12 and sum(count for _, count in sizes) == 34 - 12
    assert max(count for _, count in sizes) <= 6
    assert [row.token_id for row in rows if row.request_id == "b"] == expected_answer(second)[0]
    ledger.audit()


def test_the_block_of_the_last_known_token_is_never_shared_by_a_reservation() -> None:
    ledger, scheduler = make(parts=("model",))
    for name, cached in (("a", 0), ("b", 12), ("c", 12)):
        allocation = reserve(scheduler, request(name, 16, 2, stop_ids=()))
        assert ledger.written_tokens(allocation, 2) == cached
        scheduler.activate(allocation, TokenRow(name, 1, 16, scripted_token(name, 16), 2))
    given_up = reserve(scheduler, request("d", 16, 2))
    scheduler.unreserve(given_up)
    ledger.quarantine(given_up, ledger.block_ids(given_up)[3:])
    ledger.audit()
    assert ledger.counts().quarantined == 1


@pytest.mark.parametrize("has_room", [True, False])
def test_a_prompt_that_was_looked_at_is_hashed_once(has_room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked for in the cache, then reserved for, and queued where there is no room."""
    hashed: list[str] = []
    make_entry = Entry.of

    def counting(request: Request, digests: BlockDigests | None) -> Entry:
        hashed.append(request.request_id)
        return make_entry(request, digests)

    monkeypatch.setattr(Entry, "of", counting)
    ledger, scheduler = make(parts=("model",))
    holder = scheduler.reserve(request("holder", (1 if has_room else NUM_BLOCKS) * BLOCK_SIZE, 0))
    assert isinstance(holder, Allocation)
    one = request("one", 3 * BLOCK_SIZE, 2)
    assert scheduler.find_cached(one) == scheduler.find_cached(one) == []
    allocation = scheduler.reserve(one)
    assert isinstance(allocation, Allocation) == has_room
    if not has_room:
        assert scheduler.submit(one) is None
    assert hashed == ["holder", "one"]
    other = request("one", 3 * BLOCK_SIZE, 2)
    scheduler.find_cached(other)
    assert hashed == ["holder", "one", "one"], "another request of that name has an entry of its own"
    ledger.audit()
