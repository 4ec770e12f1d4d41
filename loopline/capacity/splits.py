"""How a number of workers is best split into prefill and decode workers."""

from dataclasses import dataclass
from fractions import Fraction

from loopline.errors import ConfigError

_MOST_OF_A_RATIO, _NEAR = 4, 0.1


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Requests a second of one worker of each kind, and of the link of one pair."""

    prefill: float
    transfer: float
    decode: float

    def of(self, num_prefill: int, num_decode: int) -> dict[str, float]:
        """Of all prefill workers, all links, all decode workers. Of the role with more workers some share the others'
        links."""
        return {
            "prefill": num_prefill * self.prefill,
            "transfer": min(num_prefill, num_decode) * self.transfer,
            "decode": num_decode * self.decode,
        }


@dataclass(frozen=True, kw_only=True)
class Split:
    """So many workers of each role, and what they serve."""

    prefill: int
    decode: int
    requests_per_s: float


def best_split(rates: Rates, num_workers: int, own: tuple[int, int]) -> Split:
    """The split of `num_workers` that serves most requests a second: of equal ones the nearest to `own`, prefill first.
    Every split is tried. Raises ConfigError below two workers."""
    if num_workers < 2:
        raise ConfigError(f"workers: {num_workers}; allowed: 2 and above, a prefill and a decode worker")
    wanted = num_workers * own[0] / sum(own)
    splits = (
        Split(
            prefill=count, decode=num_workers - count, requests_per_s=min(rates.of(count, num_workers - count).values())
        )
        for count in range(1, num_workers)
    )
    return max(splits, key=lambda split: (split.requests_per_s, -abs(split.prefill - wanted), -split.prefill))


def small_ratio(value: float) -> tuple[int, int]:
    """A near ratio of small whole numbers: of those within a tenth the one whose lesser number is least; that is 4 at
    most, and with 4 the nearest is within an eighth. `value` is above 0."""
    if value < 1:
        return small_ratio(1 / value)[::-1]
    for most in range(1, _MOST_OF_A_RATIO + 1):
        found = Fraction(value).limit_denominator(most)
        if abs(float(found) - value) <= _NEAR * value:
            break
    return found.numerator, found.denominator
