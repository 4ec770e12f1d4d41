"""What the arms of a run of sessions gave, collected turn by turn, as one JSON object. No torch, no network."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from loopline.bench.turn_figures import Limits, TurnDone, arm_figures, ratios, run_figures, same_answers
from loopline.errors import ConfigError


@dataclass(frozen=True)
class Watcher:
    """Who hears how far it is: of how many turns, what runs now, and that a turn has ended."""

    total: Callable[[int], None] = lambda count: None
    say: Callable[[str], None] = lambda part: None
    turn_done: Callable[[], None] = lambda: None


def turns_first_last(rounds: int, num_arms: int) -> Iterator[tuple[int, int]]:
    """(round, arm) in the order to run: there in even rounds and back in odd ones, so that whatever drifts falls on all
    arms alike."""
    for number in range(rounds):
        order = range(num_arms) if number % 2 == 0 else reversed(range(num_arms))
        yield from ((number, index) for index in order)


class Collected:
    """Runs of arms, in the order in which they are taken."""

    def __init__(self, names: Sequence[str], limits: Limits) -> None:
        self._limits = limits
        self._turns: dict[str, list[Sequence[TurnDone]]] = {name: [] for name in names}
        self._runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        self._errors: dict[str, str] = {}

    def take(self, name: str, turns: Sequence[TurnDone], further: Mapping[str, Any] | None = None) -> None:
        """One run of an arm; `further` figures of it."""
        self._turns[name].append(turns)
        self._runs[name].append(run_figures(turns, self._limits) | dict(further or {}))

    @contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """What fails inside is this run's failure, and the others' figures stand. A wrong setting is everybody's."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:  # whatever it is, the other runs' figures stand
            self._errors[name] = f"{type(error).__name__}: {error}"

    def report(self, pairs: Sequence[tuple[str, str]], asked_apart: Collection[str] = ()) -> dict[str, Any]:
        """Arms with their runs, medians and turns, and the named pairs' ratios, the first's figure over the second's.
        Shares of equal answers are of the first round; None where one of the two is among `asked_apart`, whose prompts
        are its own."""
        medians = {name: arm_figures(runs) for name, runs in self._runs.items()}
        compared = [(one, other) for one, other in pairs if medians[one] and medians[other]]
        return {
            "limits": asdict(self._limits),
            "arms": [
                {
                    "name": name,
                    "median": medians[name],
                    "runs": runs,
                    "turns": [[_record(one) for one in turns] for turns in self._turns[name]],
                }
                | ({"error": self._errors[name]} if name in self._errors else {})
                for name, runs in self._runs.items()
            ],
            "ratios": [
                {
                    "of": one,
                    "to": other,
                    **ratios(medians[one], medians[other]),
                    "same_answers": None
                    if one in asked_apart or other in asked_apart
                    else same_answers(self._turns[one][0], self._turns[other][0]),
                }
                for one, other in compared
            ],
        }


def failed_arms(report: Mapping[str, Any]) -> dict[str, str]:
    """Of a report: the arms of which no turn was answered, and why."""
    failed = {}
    for arm in report["arms"]:
        if not any(run["turns"] > run["failed"] for run in arm["runs"]):
            of_runs = [error for run in arm["runs"] for error in run["errors"]]
            causes = dict.fromkeys([*([arm["error"]] if "error" in arm else []), *of_runs])
            failed[arm["name"]] = "; ".join(causes) or "nothing was asked"
    return failed


def _record(done: TurnDone) -> dict[str, Any]:
    """A turn without its tokens."""
    record = asdict(done)
    record["answer_tokens"] = len(record.pop("answer_ids"))
    return record
