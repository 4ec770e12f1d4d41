"""Sessions against engines in this process: arms that share a device, equal answers, and what a run says. No times."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loopline.bench.engine_sessions import SessionRun, measure
from loopline.bench.load_plot import plot_load
from loopline.bench.load_report import Watcher
from loopline.bench.naive_core import NaiveLedger, NaiveScheduler
from loopline.bench.named_model import folder_of, spec_of
from loopline.bench.session_arms import EngineLoad, check_prefixes
from loopline.bench.sessions import SessionShape, Trace, draw_sessions
from loopline.bench.turn_figures import Limits
from loopline.cli.main import app
from loopline.engine.engine import Engine
from loopline.errors import ConfigError, InvariantBroken
from loopline.kv.ledger import Ledger
from loopline.sched.plan import StepOutcome
from loopline.sched.policy import UnifiedPolicy
from loopline.settings import EngineSettings, SchedulerSettings

ROOT = Path(__file__).parents[3]
TINY_OURO = ROOT / "configs" / "models" / "tiny-ouro"
SHAPE = SessionShape(sessions=3, turns=3, first=20, tool=9, answer=6, system=16)
LOAD = EngineLoad(model="tiny", device="cpu", dtype="fp32", rounds=1)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    load = replace(LOAD, host=("plain", "naive"), counts_calls=True)
    seen: list[str] = []
    watch = Watcher(lambda count: seen.append(f"total {count}"), seen.append, lambda: seen.append("turn"))
    report = measure(load, draw_sessions(SHAPE), Limits(ttft_s=1e9), "a test", watch)
    assert seen.count("turn") == 4 * 9 and "total 36" in seen
    return json.loads(json.dumps(report))


def test_every_arm_answers_every_turn_alike(report: dict[str, Any]) -> None:
    assert len(report["arms"]) == 4
    for arm in report["arms"]:
        (run,) = arm["runs"]
        assert run["turns"] == 9 and run["failed"] == 0 and run["good_share"] == 1 and run["steps"] > 0
        assert {one["answer_tokens"] for one in arm["turns"][0]} == {6}
        assert all(0 <= one["due_s"] <= one["first_s"] <= one["end_s"] for one in arm["turns"][0])
    assert len(report["ratios"]) == 4 and {one["same_answers"] for one in report["ratios"]} == {1.0}


def test_only_arms_with_a_cache_find_what_was_there(report: dict[str, Any]) -> None:
    for arm in report["arms"]:
        cached = {(one["session"], one["turn"]): one["cached_tokens"] for one in arm["turns"][0]}
        if "cache off" in arm["name"]:
            assert set(cached.values()) == {0}
            continue
        # Of the last turn's 36 + 6 and 15 more tokens of the turn before there are 41 and 56 with KV.
        assert {cached[f"s{number}", 1] for number in range(3)} == {32}
        assert {cached[f"s{number}", 2] for number in range(3)} == {48}
        assert sorted(cached[f"s{number}", 0] for number in range(3)) in ([0, 0, 0], [0, 16, 16])


def test_a_naive_core_makes_more_calls(report: dict[str, Any]) -> None:
    calls = report["calls"]
    for name, one in calls.items():
        assert one["answer_tokens"] == 3 * 2 * 6
        if "naive" in name:
            assert one["python_calls_per_token"] > calls[name.replace("naive", "plain")]["python_calls_per_token"]


def test_prompts_as_decode_rows_give_the_same_answers() -> None:
    load = replace(LOAD, prefix_cache=("on",), prefill=("packed", "per_row"))
    report = measure(load, draw_sessions(replace(SHAPE, sessions=2, turns=2, first=6)), Limits(), "a test", Watcher())
    assert [(one["of"], one["to"], one["same_answers"]) for one in report["ratios"]] == [("packed", "per_row", 1.0)]


def test_a_picture_is_drawn(tmp_path: Path, report: dict[str, Any]) -> None:
    first = report["arms"][0]
    lost = [one | {"error": "lost"} for one in first["turns"][0]]
    broken = first | {"turns": [lost, *first["turns"]], "runs": [first["runs"][0] | {"by_turn": []}, *first["runs"]]}
    for number, arms in enumerate([report["arms"], [broken, first | {"turns": [lost]}]]):
        plot_load(report | {"arms": arms}, tmp_path / f"report{number}.png")
        assert (tmp_path / f"report{number}.png").stat().st_size > 10_000


def test_the_cache_changes_no_answer_of_a_real_model() -> None:
    load = replace(LOAD, model=str(TINY_OURO))
    shape = SessionShape(sessions=2, turns=2, first=20, tool=9, answer=4)
    report = measure(load, draw_sessions(shape), Limits(), "a test", Watcher())
    assert [one["same_answers"] for one in report["ratios"]] == [1.0]
    assert report["arms"][0]["median"]["cached_share"] > 0.2 and report["arms"][1]["median"]["cached_share"] == 0


def test_an_arena_that_is_too_small_finds_less_and_answers_alike() -> None:
    load = replace(LOAD, working_sets=(0.9, 2.0))
    report = measure(load, draw_sessions(replace(SHAPE, system=0)), Limits(), "a test", Watcher())
    assert [one.get("error") for one in report["arms"]] == [None] * 4
    assert [one["same_answers"] for one in report["ratios"]] == [1.0, 1.0]
    shares = {one["name"]: one["median"]["cached_share"] for one in report["arms"]}
    assert shares["cache on, 0.9x arena"] > shares["cache on, 2x arena"] >= shares["cache off, 0.9x arena"] == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"host": ("clever",)}, "clever"),
        ({"prefix_cache": ("on", "on")}, "twice"),
        ({"working_sets": (0.0,)}, "working_sets"),
        ({"model": "no-such"}, "no-such"),
        ({"settings": {"num_blocks": "3"}}, "num_blocks is no setting"),
        ({"settings": {"block_size": "x"}}, "block_size is 'x'"),
        ({"settings": {"deterministic": "perhaps"}}, "deterministic is 'perhaps'"),
    ],
    ids=str,
)
def test_what_cannot_run_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        measure(replace(LOAD, **change), draw_sessions(SHAPE), Limits(), "", Watcher())


def test_a_conversation_that_is_too_long_is_named() -> None:
    with pytest.raises(ConfigError, match="has 2084 tokens; the context is 1024"):
        measure(LOAD, draw_sessions(replace(SHAPE, first=2030, turns=2, system=33)), Limits(), "", Watcher())


# ---- one run


@pytest.fixture(scope="module")
def engine() -> Engine:
    scheduler = SchedulerSettings(max_running=8, steps_ahead=0)
    with folder_of("tiny") as folder:
        settings = EngineSettings(
            model_path=str(folder), load_format="dummy", num_blocks=24, prefix_cache="on", scheduler=scheduler
        )
        return Engine(settings, UnifiedPolicy())


class _Clock:
    """Time that steps and sleep move."""

    def __init__(self) -> None:
        self.now_s = 5.0
        self.slept_s: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds

    def stepping(self, step: Callable[[], StepOutcome | None]) -> Callable[[], StepOutcome | None]:
        def timed() -> StepOutcome | None:
            self.now_s += 1.0
            return step()

        return timed


def _run(engine: Engine, trace: Trace, clock: _Clock) -> SessionRun:
    engine.start_over(UnifiedPolicy(), Ledger(24, 16))
    return SessionRun(engine, trace, "", now_s=lambda: clock.now_s, sleep=clock.sleep)


def test_clients_think_and_times_count_from_when_a_turn_was_due(engine: Engine) -> None:
    clock = _Clock()
    trace = draw_sessions(SessionShape(sessions=1, turns=2, first=4, tool=3, answer=3, think_s=7.5))
    first, second = _run(engine, trace, clock).to_end(step=clock.stepping(engine.step))
    assert (first.due_s, first.first_s, first.end_s) == (0.0, 1.0, 3.0)
    assert (second.due_s, second.first_s, second.end_s) == (10.5, 11.5, 13.5)
    assert second.prompt_tokens == 10 and sum(clock.slept_s) == 7.5


def test_sessions_start_one_after_the_other(engine: Engine) -> None:
    clock = _Clock()
    trace = draw_sessions(SessionShape(sessions=3, turns=1, first=4, answer=2, gap_s=10.0))
    turns = _run(engine, trace, clock).to_end(step=clock.stepping(engine.step))
    assert [(one.session, one.due_s, one.first_s) for one in turns] == [
        ("s0", 0.0, 1.0),
        ("s1", 10.0, 11.0),
        ("s2", 20.0, 21.0),
    ]


def test_a_turn_that_fails_ends_its_session_alone(engine: Engine) -> None:
    long = draw_sessions(SessionShape(sessions=1, turns=2, first=500, answer=2)).sessions[0]
    short = draw_sessions(SessionShape(sessions=1, turns=2, first=4, tool=2, answer=2)).sessions[0]
    trace = Trace((replace(long, name="long"), short))
    turns = _run(engine, trace, _Clock()).to_end()
    assert [(one.session, one.turn, bool(one.error)) for one in turns] == [
        ("long", 0, True),
        ("s0", 0, False),
        ("s0", 1, False),
    ]
    assert turns[0].error.startswith("refused: ")


def test_a_run_that_breaks_leaves_an_engine_for_the_next(engine: Engine) -> None:
    def breaks() -> StepOutcome | None:
        raise RuntimeError("gone")

    run = _run(engine, draw_sessions(replace(SHAPE, system=0)), _Clock())
    with pytest.raises(RuntimeError, match="gone"):
        run.to_end(step=breaks)
    engine.ledger.audit()
    assert all(not one.error for one in _run(engine, draw_sessions(SHAPE), _Clock()).to_end())


def test_an_engine_starts_over_empty_and_only_when_idle(engine: Engine) -> None:
    trace = draw_sessions(SessionShape(sessions=1, turns=1, first=40, answer=2))
    for _ in range(2):
        (turn,) = _run(engine, trace, _Clock()).to_end()
        assert turn.cached_tokens == 0
    run = _run(engine, trace, _Clock())
    with pytest.raises(InvariantBroken, match="while it has requests"):
        run.to_end(step=lambda: engine.start_over(UnifiedPolicy(), Ledger(24, 16)))
    with pytest.raises(InvariantBroken, match="25 blocks"):
        engine.start_over(UnifiedPolicy(), Ledger(25, 16))


def test_a_naive_ledger_counts_what_ours_keeps(engine: Engine) -> None:
    ledger = NaiveLedger(24, 16)
    engine.start_over(UnifiedPolicy(), ledger, NaiveScheduler)
    looks = []

    def step() -> StepOutcome | None:
        outcome = engine.step()
        looks.append(ledger.num_free_blocks)
        assert ledger.num_free_blocks == Ledger.num_free_blocks.fget(ledger)  # type: ignore[attr-defined]
        assert ledger.num_promised_blocks == Ledger.num_promised_blocks.fget(ledger)  # type: ignore[attr-defined]
        ledger.audit()
        return outcome

    trace = draw_sessions(replace(SHAPE, sessions=6, first=60))  # more than fit at once
    assert all(not one.error for one in SessionRun(engine, trace, "").to_end(step=step))
    assert min(looks) < 6


# ---- commands


def test_commands_print_a_table_and_write_json_and_a_trace(tmp_path: Path) -> None:
    engine = ["--engine", "tiny", "--device", "cpu", "--dtype", "fp32", "--rounds", "1", "--prefix-cache", "on"]
    sizes = ["--sessions", "2", "--turns", "2", "--first", "8", "--tool", "4", "--answer", "3"]
    files = ["--write-trace", str(tmp_path / "trace.jsonl"), "--json", str(tmp_path / "report.json")]
    result = CliRunner().invoke(app, ["bench", "session", *engine, *sizes, *files])
    assert result.exit_code == 0, result.output
    assert "prompt" in result.stdout and "cache on" in result.stdout
    written = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert written["trace"]["sessions"] == 2 and written["arms"][0]["runs"][0]["turns"] == 4
    again = ["bench", "session", *engine, "--trace", str(tmp_path / "trace.jsonl"), "--json", "-"]
    replayed = CliRunner().invoke(app, again)
    assert json.loads(replayed.stdout)["arms"][0]["runs"][0]["turns"] == 4
    burst = ["bench", "burst", *engine, "--requests", "3", "--prompt-tokens", "8", "--answer-tokens", "2"]
    result = CliRunner().invoke(app, [*burst, "--set", "block_size=8", "--json", "-"])
    assert json.loads(result.stdout)["arms"][0]["runs"][0]["turns"] == 3


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--engine"),
        (["--engine", "tiny", "--address", "127.0.0.1:1"], "--engine"),
        (["--arm", "127.0.0.1:1"], "--arm"),
        (["--arm", "a=localhost"], "'localhost' is not HOST:PORT"),
        (["--address", "localhost:x"], "'localhost:x' is not HOST:PORT"),
        (["--arm", "a=127.0.0.1:1", "--arm", "a=127.0.0.1:2"], "a is named twice"),
        (["--address", "127.0.0.1:1", "--prefix-cache", "off", "--set", "block_size=8"], "--prefix-cache, --set:"),
        (["--engine", "no-such"], "--engine: model is 'no-such'"),
        (["--engine", "tiny", "--deadline", "3"], "--deadline:"),
        (["--engine", "tiny", "--working-set", "x"], "--working-set is 'x'"),
        (["--engine", "tiny", "--working-set", "0"], "--working-set has 0"),
        (["--engine", "tiny", "--working-set", "0.9,0.90"], "--working-set: 0.9 is named twice"),
        (["--engine", "tiny", "--prefix-cache", "maybe"], "--prefix-cache has 'maybe'; allowed: on, off"),
        (["--engine", "tiny", "--prefill", "packed,packed"], "--prefill: packed is named twice"),
        (["--engine", "tiny", "--host", "clever"], "--host has 'clever'"),
        (["--engine", "tiny", "--set", "num_blocks=3"], "--set: num_blocks is no setting"),
        (
            ["--engine", "tiny", "--trace", "none.jsonl", "--sessions", "3", "--drawn-times"],
            "--sessions, --drawn-times:",
        ),
        (["--engine", "tiny", "--write-trace", "none/trace.jsonl"], "--write-trace is 'none/trace.jsonl'"),
        (["--engine", "tiny", "--device", "cuda:77"], "--device is cuda:77; allowed here: cpu"),
        (["--engine", "huginn-0125", "--device", "cpu"], "allowed: --set noise_key=position, or --prefix-cache off"),
    ],
)
def test_options_that_do_not_fit_are_named_before_anything_is_loaded(arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["bench", "session", *arguments])
    assert result.exit_code == 2 and named in _words(result.output), result.output


@pytest.mark.parametrize("command", ["engine", "share"])
def test_a_device_that_is_not_here_is_named(command: str) -> None:
    result = CliRunner().invoke(app, ["bench", command, "tiny", "--device", "cuda:77"])
    assert result.exit_code == 2 and "--device is cuda:77; allowed here: cpu" in _words(result.output), result.output


def test_noise_by_position_may_be_shared() -> None:
    load = replace(LOAD, model="huginn-0125")
    check_prefixes(replace(load, settings={"noise_key": "position"}), spec_of(load.model))
    check_prefixes(replace(load, prefix_cache=("off",)), spec_of(load.model))
    with pytest.raises(ConfigError, match="--prefix-cache is on,off, and the noise of huginn-0125"):
        measure(load, draw_sessions(SHAPE), Limits(), "", Watcher())


def _words(output: str) -> str:
    """What a box on the screen says, as one line."""
    return " ".join(output.replace("│", " ").split())


def test_it_needs_none_of_the_clusters_packages() -> None:
    code = (
        "import sys\n"
        "for name in ('pydantic', 'yaml', 'grpc', 'tokenizers', 'jinja2', 'nixl'): sys.modules[name] = None\n"
        "import loopline.cli.bench, loopline.bench.engine_sessions"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=110)
