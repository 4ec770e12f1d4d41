"""Figures of turns: rates, percentiles, goodput, ratios and equal answers, of made-up moments."""

from dataclasses import replace

import pytest

from loopline.bench.load_report import Collected, failed_arms, turns_first_last
from loopline.bench.turn_figures import (
    Limits,
    TurnDone,
    arm_figures,
    ratios,
    run_figures,
    same_answers,
    spread_ms,
)
from loopline.errors import ConfigError

QUICK = TurnDone(
    session="a",
    turn=0,
    due_s=0.0,
    first_s=0.1,
    end_s=0.5,
    prompt_tokens=30,
    cached_tokens=0,
    answer_ids=(1, 2, 3, 4, 5),
)
SLOW_START = replace(QUICK, session="b", first_s=1.0, end_s=1.4, cached_tokens=10)
SLOW_TOKENS = replace(QUICK, turn=1, due_s=0.5, first_s=0.6, end_s=2.0, cached_tokens=20)
ONE_TOKEN = replace(QUICK, session="c", end_s=0.1, answer_ids=(7,))
FAILED = replace(QUICK, session="d", end_s=9.0, error="lost")
LIMITS = Limits(ttft_s=0.5, tpot_s=0.2)


def test_figures_of_a_run() -> None:
    found = run_figures([QUICK, SLOW_START, SLOW_TOKENS, FAILED], LIMITS)
    assert (found["turns"], found["failed"], found["errors"]) == (4, 1, ["lost"])
    assert found["wall_s"] == 2.0  # of what was answered
    assert found["answer_tokens_per_s"] == 15 / 2.0 and found["prompt_tokens_per_s"] == 90 / 2.0
    assert found["cached_share"] == pytest.approx(30 / 90) and found["computed_prompt_tokens"] == 60
    assert found["ttft_ms"]["p50"] == pytest.approx(100) and found["ttft_ms"]["most"] == pytest.approx(1000)
    assert found["tpot_ms"]["p50"] == pytest.approx(100) and found["tpot_ms"]["most"] == pytest.approx(350)
    assert [one["turn"] for one in found["by_turn"]] == [0, 1]
    assert found["by_turn"][1]["cached_share"] == pytest.approx(20 / 30)


@pytest.mark.parametrize(
    ("turn", "limits", "is_good"),
    [
        (QUICK, LIMITS, True),
        (SLOW_START, LIMITS, False),
        (SLOW_START, replace(LIMITS, ttft_s=None), True),
        (SLOW_TOKENS, LIMITS, False),
        (SLOW_TOKENS, replace(LIMITS, tpot_s=None), True),
        (ONE_TOKEN, LIMITS, True),
        (FAILED, Limits(), False),
    ],
)
def test_goodput_counts_turns_within_the_limits(turn: TurnDone, limits: Limits, is_good: bool) -> None:
    assert limits.are_kept(turn) is is_good
    found = run_figures([turn], limits)
    assert found["good_share"] == is_good
    assert (found["goodput_per_s"] or 0) == pytest.approx(is_good / max(found["wall_s"], 1e-9))


def test_nothing_answered_has_no_rates() -> None:
    for turns in ([], [FAILED]):
        found = run_figures(turns, LIMITS)
        assert found["turns_per_s"] is None and found["ttft_ms"] is None and found["cached_share"] is None
        assert set(arm_figures([found])) <= {"wall_s", "good_share"}


def test_spreads_are_percentiles() -> None:
    assert spread_ms([]) is None
    spread = spread_ms([one / 1000 for one in range(1, 101)])
    assert spread == pytest.approx({"mean": 50.5, "p50": 50.5, "p90": 91, "p99": 100, "most": 100})


def test_arms_are_compared_by_their_medians() -> None:
    runs = [run_figures([replace(QUICK, end_s=end_s)], LIMITS) for end_s in (0.5, 1.0, 5.0)]
    medians = arm_figures(runs)
    assert medians["answer_tokens_per_s"] == 5.0 and medians["ttft_p50_ms"] == pytest.approx(100)
    assert ratios(medians, arm_figures(runs[:1]))["answer_tokens_per_s"] == 0.5
    assert "goodput_per_s" not in ratios(medians, medians | {"goodput_per_s": 0.0})


def test_answers_are_compared_turn_by_turn() -> None:
    assert same_answers([QUICK, SLOW_TOKENS], [SLOW_TOKENS, replace(QUICK, answer_ids=(1,))]) == 0.5
    assert same_answers([QUICK], [SLOW_START]) is None
    assert same_answers([FAILED], [FAILED]) is None


def test_arms_go_there_and_back() -> None:
    assert list(turns_first_last(3, 2)) == [(0, 0), (0, 1), (1, 1), (1, 0), (2, 0), (2, 1)]


def test_a_run_that_fails_leaves_the_others_their_figures() -> None:
    collected = Collected(["good", "bad"], LIMITS)
    with collected.guarded("good"):
        collected.take("good", [QUICK], {"steps": 3})
    with collected.guarded("bad"):
        raise RuntimeError("gone")
    report = collected.report([("good", "bad")])
    good, bad = report["arms"]
    assert bad["error"] == "RuntimeError: gone" and bad["runs"] == [] and report["ratios"] == []
    assert good["runs"][0]["steps"] == 3 and good["turns"][0][0]["answer_tokens"] == 5
    assert "answer_ids" not in good["turns"][0][0]


def test_a_wrong_setting_is_everybodys() -> None:
    with pytest.raises(ConfigError), Collected(["one"], LIMITS).guarded("one"):
        raise ConfigError("no")


def test_a_run_says_where_prompts_came_from_and_what_was_moved() -> None:
    fetched = replace(QUICK, prefix_source="fetch", handoff_bytes=10, fetched_bytes=3)
    turns = [fetched, replace(fetched, turn=1), replace(QUICK, prefix_source="recompute", handoff_bytes=5)]
    found = run_figures([*turns, replace(fetched, error="lost")], LIMITS)
    assert found["prefix_sources"] == {"fetch": 2, "recompute": 1}
    assert (found["handoff_bytes"], found["fetched_bytes"]) == (25, 6)
    assert run_figures([QUICK], LIMITS)["prefix_sources"] == {}


def test_answers_to_other_prompts_are_not_compared() -> None:
    collected = Collected(["one", "same", "apart"], LIMITS)
    for name in ("one", "same", "apart"):
        collected.take(name, [QUICK])
    report = collected.report([("one", "same"), ("one", "apart")], asked_apart={"apart"})
    assert [one["same_answers"] for one in report["ratios"]] == [1.0, None]


def test_an_arm_without_an_answer_has_failed_and_says_why() -> None:
    collected = Collected(["good", "mixed", "gone", "refused"], LIMITS)
    collected.take("good", [QUICK, FAILED])
    collected.take("mixed", [FAILED])
    collected.take("mixed", [QUICK])
    with collected.guarded("gone"):
        raise RuntimeError("no cluster")
    for error in ("too large", "lost"):
        collected.take("refused", [replace(FAILED, error=error)])
    failed = failed_arms(collected.report([]))
    assert failed == {"gone": "RuntimeError: no cluster", "refused": "too large; lost"}
