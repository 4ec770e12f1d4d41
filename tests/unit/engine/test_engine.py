"""The engine around its parts: settings that nobody knows, and steps that fail where they are collected."""

from dataclasses import replace

import pytest

from loopline.engine.engine import Engine
from loopline.engine.packed_loop import _STEPS, GraphPacked
from loopline.engine.runner import MOST_STEPS_AHEAD, Runner, Submitted
from loopline.errors import ConfigError
from loopline.request import Request, SamplingParams
from loopline.sched.plan import StepResult
from loopline.sched.policy import UnifiedPolicy
from loopline.settings import EngineSettings, SchedulerSettings
from tests.support.golden import MODELS

SETTINGS = EngineSettings(model_path=str(MODELS / "tiny-ouro"), num_blocks=32)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prefill": "pakced"}, "prefill is 'pakced'; allowed: auto, packed, per_row"),
        ({"load_format": "gguf"}, "load_format is 'gguf'; allowed: safetensors, dummy"),
        ({"scheduler": SchedulerSettings(steps_ahead=-1)}, "steps_ahead is -1; allowed: 0, 1, 2"),
        ({"scheduler": SchedulerSettings(steps_ahead=MOST_STEPS_AHEAD + 1)}, "steps_ahead is 3; allowed: 0, 1, 2"),
    ],
)
def test_unknown_settings_are_named(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Engine(replace(SETTINGS, **changes), UnifiedPolicy())  # type: ignore[arg-type]


class FailsOnce:
    """A runner whose first result is lost on its way to the host."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._failed = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def collect(self, submitted: Submitted) -> StepResult:
        if not self._failed:
            self._failed = True
            raise RuntimeError("the tokens did not come")
        return self._runner.collect(submitted)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_step_that_fails_when_it_is_collected_costs_its_requests_alone(steps_ahead: int) -> None:
    engine = Engine(replace(SETTINGS, scheduler=SchedulerSettings(steps_ahead=steps_ahead)), UnifiedPolicy())
    engine._runner = FailsOnce(engine._runner)  # type: ignore[assignment]
    for name in ("lost", "kept"):
        request = Request(request_id=name, prompt_ids=(5, 6, 7), params=SamplingParams(max_tokens=3, loops=4))
        assert engine.scheduler.submit(request) is None
        tokens = 0
        while engine.scheduler.has_work:
            outcome = engine.step()
            assert outcome is not None
            tokens += len(outcome.rows)
            for lost in outcome.lost:
                assert lost.request_id == "lost"
                engine.ledger.release(lost.allocation)
        assert tokens == (0 if name == "lost" else 3)
        engine.ledger.audit()
    assert engine.ledger.counts().held == 0


@pytest.mark.parametrize(("max_rows", "largest"), [(64, 64), (100, 100), (2048, 2048), (8192, 2048)])
def test_prompt_buckets_end_where_graphs_stop_to_gain(max_rows: int, largest: int) -> None:
    buckets = GraphPacked.buckets_up_to(max_rows)
    assert buckets == tuple(sorted(set(buckets)))
    assert buckets[-1] == largest
    assert set(buckets[:-1]) <= set(_STEPS)
