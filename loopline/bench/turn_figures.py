"""What became of each turn of a run, and the figures of a run, an arm and a pair of arms. No torch, no network."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TurnDone:
    """One turn. Moments are seconds since the run began; `error` "": it has its whole answer."""

    session: str
    turn: int
    due_s: float
    """When it was to be asked; times count from here."""
    first_s: float = 0.0
    end_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt's, those whose KV was found."""
    answer_ids: tuple[int, ...] = ()
    route: str = ""
    """Which workers computed it, where there are several."""
    prefix_source: str = ""
    """Where the KV that its decode worker lacked came from, as a PrefixSource; "" of an engine."""
    handoff_bytes: int = 0
    """That its prefill worker pushed to its decode worker."""
    fetched_bytes: int = 0
    """That its decode worker pushed to its prefill worker before; not among `handoff_bytes`."""
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first; None of an answer with one."""
        count = len(self.answer_ids) - 1
        return (self.end_s - self.first_s) / count if count > 0 else None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a turn must keep to count as good; None: anything."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def are_kept(self, done: TurnDone) -> bool:
        if done.error:
            return False
        slow_start = self.ttft_s is not None and done.ttft_s > self.ttft_s
        slow_tokens = self.tpot_s is not None and done.tpot_s is not None and done.tpot_s > self.tpot_s
        return not slow_start and not slow_tokens


def run_figures(turns: Sequence[TurnDone], limits: Limits) -> dict[str, Any]:
    """Figures of one run. Rates are over the time from its begin to its last token; times are milliseconds. None where
    nothing was answered."""
    done = [one for one in turns if not one.error]
    wall_s = max((one.end_s for one in done), default=0.0)
    good = sum(map(limits.are_kept, turns))
    prompt, cached = sum(one.prompt_tokens for one in done), sum(one.cached_tokens for one in done)
    answer = sum(len(one.answer_ids) for one in done)

    def rate(count: float) -> float | None:
        return count / wall_s if wall_s > 0 else None

    return {
        "turns": len(turns),
        "failed": len(turns) - len(done),
        "errors": sorted({one.error for one in turns if one.error})[:5],
        "wall_s": wall_s,
        "turns_per_s": rate(len(done)),
        "answer_tokens_per_s": rate(answer),
        "prompt_tokens_per_s": rate(prompt),
        "computed_prompt_tokens": prompt - cached,
        "cached_share": cached / prompt if prompt else None,
        "ttft_ms": spread_ms([one.ttft_s for one in done]),
        "tpot_ms": spread_ms([one.tpot_s for one in done if one.tpot_s is not None]),
        "good_share": good / len(turns) if turns else None,
        "goodput_per_s": rate(good),
        "prefix_sources": dict(sorted(Counter(one.prefix_source for one in done if one.prefix_source).items())),
        "handoff_bytes": sum(one.handoff_bytes for one in done),
        "fetched_bytes": sum(one.fetched_bytes for one in done),
        "by_turn": _by_turn(done),
    }


def _by_turn(done: Sequence[TurnDone]) -> list[dict[str, Any]]:
    """Of each number of a turn: the median time to its first token and how much of its prompts was cached."""
    figures = []
    for index in sorted({one.turn for one in done}):
        some = [one for one in done if one.turn == index]
        prompt = sum(one.prompt_tokens for one in some)
        figures.append(
            {
                "turn": index,
                "ttft_p50_ms": 1e3 * median(one.ttft_s for one in some),
                "cached_share": sum(one.cached_tokens for one in some) / prompt,
            }
        )
    return figures


def spread_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, p50, p90, p99 and most, in milliseconds; None of nothing."""
    if not seconds:
        return None
    ordered = sorted(seconds)

    def at(percent: int) -> float:
        return 1e3 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]

    mean = 1e3 * sum(ordered) / len(ordered)
    return {"mean": mean, "p50": 1e3 * median(ordered), "p90": at(90), "p99": at(99), "most": 1e3 * ordered[-1]}


_NAMES = (
    "wall_s",
    "turns_per_s",
    "answer_tokens_per_s",
    "prompt_tokens_per_s",
    "cached_share",
    "good_share",
    "goodput_per_s",
)


def arm_figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians over an arm's runs, of what the runs have."""
    flat = [_flat(run) for run in runs]
    names = dict.fromkeys(name for one in flat for name in one)
    return {name: float(median(one[name] for one in flat if name in one)) for name in names}


def _flat(run: Mapping[str, Any]) -> dict[str, float]:
    figures = {name: run[name] for name in _NAMES}
    for name in ("ttft", "tpot"):
        spread = run[f"{name}_ms"] or {}
        figures |= {f"{name}_{part}_ms": spread.get(part) for part in ("p50", "p99")}
    return {name: value for name, value in figures.items() if value is not None}


def ratios(some: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
    """How many times as large each of `some` is, where both have it."""
    names = ("answer_tokens_per_s", "turns_per_s", "goodput_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms")
    return {name: some[name] / others[name] for name in names if name in some and others.get(name)}


def same_answers(some: Sequence[TurnDone], others: Sequence[TurnDone]) -> float | None:
    """Share of turns that got the same tokens in both runs, of those answered in both."""
    answers = {(one.session, one.turn): one.answer_ids for one in others if not one.error}
    pairs = [(one.answer_ids, answers.get((one.session, one.turn))) for one in some if not one.error]
    pairs = [pair for pair in pairs if pair[1] is not None]
    return sum(mine == theirs for mine, theirs in pairs) / len(pairs) if pairs else None
