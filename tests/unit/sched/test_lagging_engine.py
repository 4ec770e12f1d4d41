"""Steps planned ahead while requests come and go: what a step may still write is handed to nobody else."""

import random

import pytest

from loopline.settings import SchedulerSettings
from tests.support.scheduling import ScriptedEngine, make, request


@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
@pytest.mark.parametrize("parts", [None, ("model",)], ids=["private", "shared"])
def test_a_freed_block_waits_for_the_step_that_may_write_it(steps_ahead: int, parts: tuple[str, ...] | None) -> None:
    """The ledger under test checks each hand-out; removals fall between a plan and its commit."""
    generator = random.Random(7)
    ledger, scheduler = make(SchedulerSettings(max_running=6, chunk_tokens=8, steps_ahead=steps_ahead), parts=parts)
    engine, num_waiting = ScriptedEngine(scheduler, steps_ahead), 0
    for number in range(400):
        scheduler.submit(request(f"r{number}", generator.randrange(1, 30), generator.randrange(1, 20)))
        while engine.may_submit and engine.submit() is not None:
            pass
        names = engine.in_flight[-1][0].request_ids
        if generator.random() < 0.2 and (removed := scheduler.remove(generator.choice(names))):
            ledger.release(removed)
            num_waiting += len(ledger._waiting)
        engine.commit()
        ledger.audit()
        assert scheduler.num_in_flight == len(engine.in_flight) <= steps_ahead
    assert ledger.num_reused > 50 and num_waiting > 10
    while engine.in_flight:
        engine.commit()
    assert not ledger._waiting
