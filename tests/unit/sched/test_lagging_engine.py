"""A scripted engine that is two steps behind: what a step may still write is handed to nobody else."""

import random

from loopline.kv.ledger import Allocation, Ledger
from loopline.sched.policy import UnifiedPolicy
from loopline.sched.scheduler import Scheduler
from loopline.settings import SchedulerSettings
from tests.support.scheduling import BLOCK_SIZE, request, run_scripted

LAG = 2


class LaggingLedger(Ledger):
    """Hears of the end of each step two steps late."""

    def __init__(self) -> None:
        super().__init__(24, BLOCK_SIZE)
        self.done = 0

    def step_done(self, step: int) -> None:
        self.done = max(0, step - LAG)
        super().step_done(self.done)


def test_a_freed_block_waits_for_the_step_that_may_write_it() -> None:
    generator, ledger = random.Random(7), LaggingLedger()
    scheduler = Scheduler(ledger, SchedulerSettings(max_running=6, chunk_tokens=8), UnifiedPolicy())
    written_by: dict[int, int] = {}  # block -> last step that may write it
    seen: dict[Allocation, int] = {}  # allocation -> blocks of it that were checked
    reused = 0
    for number in range(400):
        scheduler.submit(request(f"r{number}", generator.randrange(1, 30), generator.randrange(1, 20)))
        plan = scheduler.plan()
        if plan is None:
            ledger.step_done(scheduler.step + LAG)  # nothing runs: the engine catches up
            continue
        allocations = [one for part in plan.segments if part.decode for one in part.decode.allocations]
        for allocation in allocations + [run.allocation for run in plan.runs]:
            blocks = ledger.block_ids(allocation)
            for block in blocks[seen.get(allocation, 0) :]:
                reused += block in written_by
                assert written_by.get(block, 0) <= ledger.done, "handed out while a step may still write it"
            seen[allocation] = len(blocks)
            written_by.update(dict.fromkeys(blocks, plan.step))
        scheduler.commit(plan, run_scripted(plan))
        if generator.random() < 0.2 and (removed := scheduler.remove(generator.choice(plan.request_ids))):
            ledger.release(removed)
        ledger.audit()
    assert reused > 50
