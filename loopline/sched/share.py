"""The share of a step that prompts may take beside rows that decode, such that the step takes no longer than a bound.

A request that decodes gets a token from every step, so what a step takes is its time per token. It is predicted from
what steps took before:

    seconds = decode(rows) + each x token-loops of prompts + margin

`decode(rows)` was measured in steps without prompts, apart for each number of rows; `each` is what a prompt's
token-loop added in steps with both. The margin is a few times the mean deviation from the prediction, and more of them
while too many steps pass the bound. The first prompt of all starts with the least share, and no step carries more than
twice what one has carried within the bound. What is wrong in the model corrects itself: `each` is that of the shares
which are given, so where they settle a step takes what was predicted.

That holds as long as `decode(rows)` is right. Steps with both cannot tell slower rows from dearer prompts, and would
leave the share small; so while the estimate limits it, one step of many carries no prompt and measures the rows. What
that moves is made up for in `each`, such that the last step with both is predicted as before.

Passes over rows are padded, so a prompt's share is one of a few numbers of rows (`RowSteps`). The least of these is
given in all other steps: a prompt always progresses, and `num_least` counts the steps in which that was against the
prediction.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from loopline.sched.plan import StepPlan

ROW_TILE = 8
_NEWEST = 1 / 4  # weight of a new measurement
_MOST_ABOVE = 6.0  # deviations that a measurement above the mean counts for at most; below it there are no outliers
_LEAST_DEVIATION = 0.01  # of the mean: below it a change could not be told from an outlier
_LEAST_MARGIN, _MOST_MARGIN = 6.0, 64.0  # deviations
_PASSED_SHARE = 0.005  # of steps that may pass the bound; beyond it the margin grows
_WIDER = 1.5  # times so much for each step that does
_MOST_ROW_COUNTS = 64
_ALONE_EVERY = 64  # steps with prompts, and then one of decode rows alone
_ALONE_AGAIN = 8  # where the last such step took much longer than the mean
_MUCH_LONGER = 1.1  # times


@dataclass(frozen=True)
class RowSteps:
    """Numbers of rows that a pass is padded to: `sizes`, ascending, and beyond them every multiple of a tile."""

    sizes: tuple[int, ...] = ()

    def padded(self, num_rows: int) -> int:
        """Rows that are computed for so many."""
        if self.sizes and num_rows <= self.sizes[-1]:
            return self.sizes[bisect_left(self.sizes, num_rows)] if num_rows else 0
        return num_rows + -num_rows % ROW_TILE

    def most(self, num_rows: int) -> int:
        """The largest padded number that is not above; 0 if there is none."""
        if self.sizes and num_rows < self.padded(self.sizes[-1] + 1):
            index = bisect_right(self.sizes, num_rows)
            return self.sizes[index - 1] if index else 0
        return num_rows - num_rows % ROW_TILE


TILES = RowSteps()


class RunningMean:
    """Mean of what is measured, weighted to what came last; at first the plain mean of all."""

    def __init__(self) -> None:
        self.mean = 0.0
        self._count = 0

    @property
    def is_known(self) -> bool:
        return self._count > 0

    def observe(self, value: float) -> None:
        """One measurement."""
        self._count += 1
        self.mean += (value - self.mean) * max(_NEWEST, 1 / self._count)

    def correct(self, value: float) -> None:
        """It is known to be `value` by something else than a measurement of it."""
        self.mean = value

    def lower_to(self, value: float) -> None:
        """It is known not to be above `value`."""
        self.mean = min(self.mean, value) if self.is_known else value
        self._count = max(1, self._count)


class PromptShare:
    """Learns what steps take, and says how much of prompts the next one may carry. Pure: it is told all times.

    Invariant: at least one pass of the least number of rows is granted in seven steps of eight.
    """

    def __init__(self, bound_s: float | None, rows: RowSteps) -> None:
        """`bound_s`: seconds that a step with decode rows may take; None: as long as it likes, and nothing is learnt.
        `rows`: what passes over prompts are padded to."""
        self.bound_s = bound_s
        self.rows = rows
        self.num_least = 0
        """Steps that carried the least share although even that was predicted to pass the bound."""
        self.num_passed = 0
        """Steps with decode rows and prompts that took longer than the bound."""
        self._decode: dict[int, RunningMean] = {}  # by decode work
        self._each = RunningMean()  # seconds of a prompt's token-loop
        self._deviation_s = 0.0
        self._margin = _LEAST_MARGIN * _WIDER**2  # as after two steps that passed: of the first hundred one may
        self._proven = 0  # most token-loops of prompts that a step has carried within the bound
        self._last_both: tuple[int, int] | None = None  # decode work and prompts, if the last step had both
        self._until_alone = _ALONE_EVERY  # shares that the estimate may still limit before a step without prompts

    def token_loops(self, decode: Mapping[int, int], depth: int) -> int | None:
        """Most token-loops of prompts in a step with decode rows, whose numbers stand in `decode` by depth; None: no
        bound. `depth`: of the prompt that is first, which gets a pass of the least number of rows. 0: this step is to
        measure the decode rows alone. To be asked once for a step that has prompts."""
        if self.bound_s is None:
            return None
        least = self.rows.padded(1) * depth
        if not self._each.is_known:
            return least
        most = 2 * max(least, self._proven)
        spare_s = self.bound_s - self._decode_s(_decode_work(decode)) - self._margin * self._deviation_s
        if self._each.mean * most <= spare_s:
            return most
        self._until_alone -= 1
        if self._until_alone < 0:
            self._until_alone = _ALONE_EVERY
            return 0
        if spare_s < least * self._each.mean:
            self.num_least += 1
            return least
        return max(least, int(spare_s / self._each.mean))

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step of this plan took so long, counted from the end of the one before it where they followed at once."""
        if self.bound_s is None:
            return
        decode = {one.last_loop: len(one.decode) for one in plan.segments if one.decode is not None}
        if not decode:
            return
        work = _decode_work(decode)
        passes = [(sum(run.num_tokens for run in one.runs), one.last_loop) for one in plan.segments if one.runs]
        if not passes:
            self._observe_decode(work, seconds)
            return
        prompts = sum(self.rows.padded(count) * depth for count, depth in passes)
        least = self.rows.padded(1) * max(depth for _, depth in passes)
        self._observe_both(work, prompts, prompts <= least, seconds)

    def _observe_decode(self, work: int, seconds: float) -> None:
        before_s = self._decode_s(work)
        known = self._decode.pop(work, None) or RunningMean()
        is_much_longer = known.is_known and seconds > known.mean * _MUCH_LONGER
        self._until_alone = _ALONE_AGAIN if is_much_longer else _ALONE_EVERY
        if known.is_known:
            seconds = min(seconds, known.mean * 2)  # an outlier; what lasts is followed all the same
        known.observe(seconds)
        self._decode[work] = known  # the latest last
        if self._last_both is not None and self._last_both[0] == work and self._each.is_known:
            self._each.correct(max(0.0, self._each.mean + (before_s - known.mean) / self._last_both[1]))
        self._last_both = None
        if len(self._decode) > _MOST_ROW_COUNTS:
            del self._decode[next(iter(self._decode))]

    def _observe_both(self, work: int, prompts: int, is_least: bool, seconds: float) -> None:
        assert self.bound_s is not None
        self._last_both = work, prompts
        has_passed = seconds > self.bound_s
        self.num_passed += has_passed
        is_too_narrow = has_passed and not is_least  # of the least share no margin makes less
        self._margin *= _WIDER ** (is_too_narrow - _PASSED_SHARE)
        self._margin = min(_MOST_MARGIN, max(_LEAST_MARGIN, self._margin))
        if not has_passed:
            self._proven = max(self._proven, prompts)
        decode_s = self._decode_s(work)
        if seconds <= decode_s:  # a step of these rows alone would not have taken longer
            self._decode.setdefault(work, RunningMean()).lower_to(seconds)
            return
        if not self._each.is_known:
            self._each.observe((seconds - decode_s) / prompts)
            self._deviation_s = (seconds - decode_s) / 2
            return
        expected_s = decode_s + self._each.mean * prompts
        usual_s = max(self._deviation_s, _LEAST_DEVIATION * expected_s)
        off_s = min(_MOST_ABOVE * usual_s, seconds - expected_s)
        self._each.observe(max(0.0, self._each.mean + off_s / prompts))
        # A step that took far less than expected says that the mean is too high, not that steps are uncertain.
        self._deviation_s += (max(off_s, min(-off_s, self._deviation_s)) - self._deviation_s) * _NEWEST

    def _decode_s(self, work: int) -> float:
        """What a step of decode rows alone takes; of a number of rows that is not known yet rather too much."""
        known = self._decode.get(work)
        if known is not None:
            return known.mean
        above = [one for one in self._decode if one > work]
        if above:
            return self._decode[min(above)].mean
        below = max(self._decode, default=None)
        return 0.0 if below is None else self._decode[below].mean * work / below


def _decode_work(decode: Mapping[int, int]) -> int:
    """Token-loops of decode rows, as they are computed: padded."""
    return sum((rows + -rows % ROW_TILE) * depth for depth, rows in decode.items())
