"""The routing benchmark runs, and what it compares decides alike. No times."""

from dataclasses import replace

from loopline.bench import router, router_prefixes
from loopline.bench.router import PLAIN, POLICIES


def test_every_arm_has_its_figures() -> None:
    report = router.measure(router.QUICK)
    points = {(one["workers"], one["queued"]) for one in report["points"]}
    assert points == {(workers, queued) for workers in router.QUICK.workers for queued in router.QUICK.queued}
    for one in report["points"]:
        assert one["decisions_per_s"] > 0 and one["wake_us"] > 0 and one["rounds"]
    assert {one["arm"] for one in report["points"]} == {*POLICIES, PLAIN}


def test_prefix_aware_finds_more_of_shared_prefixes_than_least_work() -> None:
    scenario = replace(router_prefixes.Scenario(), requests=200)
    report = router_prefixes.compare(scenario)
    rates = {one["policy"]: one["shared_hit_rate"] for one in report["arms"]}
    assert rates["prefix_aware"] > rates["least_work"] + 0.2
    waits = {one["policy"]: one["ttft_mean_s"] for one in report["arms"]}  # virtual seconds: the same everywhere
    assert waits["prefix_aware"] < waits["least_work"]
    assert report["arms"] == router_prefixes.compare(scenario)["arms"]


def test_with_everything_cached_prefix_aware_still_uses_all_workers() -> None:
    """One beginning for all: the worker that has it does not get everything."""
    scenario = replace(router_prefixes.Scenario(), requests=200, prefixes=1, load=3.0)
    report = router_prefixes.compare(scenario)
    waits = {one["policy"]: one["ttft_p99_s"] for one in report["arms"]}
    assert waits["prefix_aware"] <= 1.2 * waits["least_work"]
