"""Sessions as agents have them: a growing conversation that is sent again at every turn. What is asked and when, and
nothing of who answers; no torch, no network.

A **trace** names for each turn how many tokens it adds, how many it has answered, and how long the client waits before
it asks. The same trace and vocabulary give the same tokens in every process, apart from the answers, which are whatever
the model says. `draw_sessions` makes traces, `write_trace` and `read_trace` keep them as files.

    turn 0: system prompt, first prompt       -> answer
    turn 1: all of that, tool tokens          -> answer        after a wait
    turn 2: all of that, tool tokens          -> answer        ...
"""

import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loopline.errors import ConfigError

KIND, VERSION = "loopline-sessions", 1
_HEAD_KEYS = ("kind", "version", "seed", "system_tokens", "made_by")
_TURN_KEYS = ("session", "turn", "wait_s", "tokens", "token_ids", "answer")
_MOST_TOKENS = 10_000_000  # of a turn: past it a file is surely wrong
_MOST_S = 86_400  # that somebody thinks
_MOST_SIGMA = 10


@dataclass(frozen=True, kw_only=True)
class SessionShape:
    """What `draw_sessions` draws from. Lengths are in tokens, times in seconds."""

    sessions: int = 32
    turns: int = 6
    """Of each session."""
    first: int = 256
    """Tokens that a session's first turn adds."""
    tool: int = 64
    """Tokens that each further turn adds."""
    answer: int = 64
    """Tokens of each answer; no stop id ends one before."""
    system: int = 0
    """Tokens that all sessions begin with."""
    think_s: float = 0.0
    """Between an answer's end and the next turn."""
    gap_s: float = 0.0
    """Between the starts of two sessions; 0: all start at once."""
    sigma: float = 0.0
    """0: lengths are as given. Above: lengths of turns and answers are log-normal, with these as their means and this
    deviation of the logarithm."""
    drawn_times: bool = False
    """Whether times are exponential with these means, and not fixed."""
    seed: int = 0


@dataclass(frozen=True)
class Turn:
    """What one turn adds to its conversation. `token_ids` None: `num_tokens` random ones."""

    num_tokens: int
    answer_tokens: int
    wait_s: float = 0.0  # after the answer before; of the first turn after the start of all
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Session:
    name: str
    turns: tuple[Turn, ...]

    def length_after(self, turn: int) -> int:
        """Tokens of the conversation when that turn is answered, a common beginning left out."""
        return sum(one.num_tokens + one.answer_tokens for one in self.turns[: turn + 1])


@dataclass(frozen=True)
class Trace:
    """Sessions, each with one turn at least; `seed` is that of random tokens, `made_by` says where it comes from."""

    sessions: tuple[Session, ...]
    system_tokens: int = 0
    seed: int = 0
    made_by: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_turns(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation with its last answer."""
        return self.system_tokens + max(one.length_after(len(one.turns)) for one in self.sessions)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts as they are sent: every turn its whole conversation."""
        return sum(
            self.system_tokens + session.length_after(index) - turn.answer_tokens
            for session in self.sessions
            for index, turn in enumerate(session.turns)
        )

    @property
    def answer_tokens(self) -> int:
        return sum(turn.answer_tokens for session in self.sessions for turn in session.turns)

    def working_set_blocks(self, block_size: int) -> int:
        """Blocks that hold every conversation to its end at once, whole blocks of the common beginning once. The last
        token of a conversation has no KV."""
        common = self.system_tokens // block_size
        ends = (self.system_tokens + one.length_after(len(one.turns)) - 1 for one in self.sessions)
        return common + sum(-(-end // block_size) - common for end in ends)

    def first_turns(self, count: int) -> "Trace":
        """The same sessions, cut short."""
        sessions = tuple(Session(one.name, one.turns[:count]) for one in self.sessions)
        return Trace(sessions, self.system_tokens, self.seed, self.made_by)


class Conversation:
    """One session as it goes on: `ask` and `take` alternate. Two of the same name, trace, vocabulary and salt ask the
    same while they are answered the same."""

    def __init__(self, trace: Trace, session: Session, vocab_size: int, salt: str = "") -> None:
        """`salt`: other tokens for the same turns, so that nothing of an earlier run is cached."""
        self.session = session
        self._vocab_size = vocab_size
        self._key = f"{trace.seed}/{salt}"
        self._token_ids: list[int] = self._draw("system", trace.system_tokens)
        self._next = 0

    @property
    def next_turn(self) -> Turn | None:
        """What comes next; None: it is over."""
        return self.session.turns[self._next] if self._next < len(self.session.turns) else None

    @property
    def num_asked(self) -> int:
        """Turns that were asked so far."""
        return self._next

    def ask(self) -> tuple[int, ...]:
        """The next turn's whole prompt."""
        turn = self.session.turns[self._next]
        if turn.token_ids is not None:
            self._token_ids += [one % self._vocab_size for one in turn.token_ids]
        else:
            self._token_ids += self._draw(f"{self.session.name}/{self._next}", turn.num_tokens)
        self._next += 1
        return tuple(self._token_ids)

    def take(self, answer_ids: Sequence[int]) -> None:
        """The answer to the prompt that was asked last."""
        self._token_ids += answer_ids

    def give_up(self) -> None:
        """No further turn is asked."""
        self._next = len(self.session.turns)

    def _draw(self, name: str, count: int) -> list[int]:
        draw = random.Random(f"{self._key}/{name}").random  # the one method whose values Python keeps between versions
        return [int(draw() * self._vocab_size) for _ in range(count)]


def draw_sessions(shape: SessionShape) -> Trace:
    """A trace of that shape: the same for the same shape. Raises ConfigError that names a number out of range."""
    _check(shape)
    draw, sessions, start_s = random.Random(f"{shape.seed}"), [], 0.0

    def length(mean: int) -> int:
        if not shape.sigma:
            return mean
        return max(1, round(draw.lognormvariate(math.log(mean) - shape.sigma**2 / 2, shape.sigma)))

    def seconds(mean_s: float) -> float:
        return draw.expovariate(1 / mean_s) if shape.drawn_times and mean_s else mean_s

    for number in range(shape.sessions):
        turns = []
        for index in range(shape.turns):
            wait_s = seconds(shape.think_s) if index else start_s
            turns.append(Turn(length(shape.tool if index else shape.first), length(shape.answer), wait_s))
        sessions.append(Session(f"s{number}", tuple(turns)))
        start_s += seconds(shape.gap_s)
    return Trace(tuple(sessions), shape.system, shape.seed, asdict(shape))


def draw_burst(requests: int, prompt_tokens: int, answer_tokens: int, seed: int = 0) -> Trace:
    """So many requests at once, each a session of one turn. Raises ConfigError as `draw_sessions` does."""
    shape = SessionShape(sessions=requests, turns=1, first=prompt_tokens, answer=answer_tokens, seed=seed)
    return draw_sessions(shape)


# ---- files


def write_trace(trace: Trace, path: Path) -> None:
    """One JSON object a line: what the trace is, then each turn. `docs/cli.md` has the fields."""
    head = {
        "kind": KIND,
        "version": VERSION,
        "seed": trace.seed,
        "system_tokens": trace.system_tokens,
        "made_by": dict(trace.made_by),
    }
    lines = [json.dumps(head), *map(json.dumps, _turn_records(trace))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_trace(path: Path) -> Trace:
    """The trace of a file. Raises ConfigError that names file, line and value."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"the trace {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the trace {path} cannot be read: byte {error.start} is no UTF-8") from error
    head, *turns = [(number, _record(path, number, line)) for number, line in enumerate(lines, 1) if line.strip()] or [
        (1, {})
    ]
    where = f"{path}:1"
    made_by = _check_head(where, head[1])
    sessions: dict[str, list[Turn]] = {}
    for number, record in turns:
        _take_turn(f"{path}:{number}", record, sessions)
    if not sessions:
        raise ConfigError(f"{path}: no turn; allowed: 1 and more lines after the first")
    return Trace(
        tuple(Session(name, tuple(turns)) for name, turns in sessions.items()),
        _number(where, head[1], "system_tokens", 0, default=0),
        _number(where, head[1], "seed", 0, default=0),
        {"trace": str(path)} | made_by,
    )


def _turn_records(trace: Trace) -> Iterator[dict[str, Any]]:
    for session in trace.sessions:
        for index, turn in enumerate(session.turns):
            record: dict[str, Any] = {"session": session.name, "turn": index, "wait_s": turn.wait_s}
            if turn.token_ids is None:
                record["tokens"] = turn.num_tokens
            else:
                record["token_ids"] = list(turn.token_ids)
            yield record | {"answer": turn.answer_tokens}


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}:{number}: no JSON: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{path}:{number}: {line[:40]!r}; allowed: a JSON object")
    return record


def _check_head(where: str, head: Mapping[str, Any]) -> dict[str, Any]:
    """What the trace was made by."""
    if head.get("kind") != KIND:
        raise ConfigError(f'{where}: no trace; allowed: a first line with "kind": "{KIND}", "version": {VERSION}')
    if head.get("version") != VERSION:
        raise ConfigError(f"{where}: version is {head.get('version')!r}; the one that is known here: {VERSION}")
    _check_keys(where, head, _HEAD_KEYS)
    made_by = head.get("made_by", {})
    if not isinstance(made_by, dict):
        raise ConfigError(f"{where}: made_by is {str(made_by)[:40]!r}; allowed: a JSON object")
    return made_by


def _check_keys(where: str, record: Mapping[str, Any], allowed: Sequence[str]) -> None:
    for key in record:
        if key not in allowed:
            raise ConfigError(f"{where}: {key} is not known; allowed: {', '.join(allowed)}")


def _take_turn(where: str, record: Mapping[str, Any], sessions: dict[str, list[Turn]]) -> None:
    _check_keys(where, record, _TURN_KEYS)
    name = record.get("session")
    if not isinstance(name, str) or not name or not name.isprintable():  # a half of a surrogate pair is not
        raise ConfigError(f"{where}: session is {str(name)[:40]!r}; allowed: a name")
    turns = sessions.setdefault(name, [])
    if record.get("turn") != len(turns):
        raise ConfigError(f"{where}: turn is {record.get('turn')!r}; the next one of session {name} is {len(turns)}")
    wait_s = record.get("wait_s", 0.0)
    if not isinstance(wait_s, int | float) or isinstance(wait_s, bool) or not 0 <= wait_s <= _MOST_S:
        raise ConfigError(f"{where}: wait_s is {str(wait_s)[:40]}; allowed: seconds from 0 to {_MOST_S:,}")
    ids = record.get("token_ids")
    if ids is not None and not (_is_list_of_ids(ids) and ids):
        raise ConfigError(f"{where}: token_ids is {str(ids)[:40]}; allowed: a list of whole numbers from 0")
    if ids is not None and "tokens" in record:
        raise ConfigError(f"{where}: tokens and token_ids are both there; allowed: one of them")
    if ids is None and "tokens" not in record:
        raise ConfigError(f"{where}: tokens is missing; allowed: whole numbers from 1, or token_ids in its place")
    count = len(ids) if ids is not None else _number(where, record, "tokens", 1)
    turns.append(Turn(count, _number(where, record, "answer", 1), float(wait_s), None if ids is None else tuple(ids)))


def _is_list_of_ids(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, int) and not isinstance(one, bool) and 0 <= one <= _MOST_TOKENS for one in value
    )


def _number(where: str, record: Mapping[str, Any], name: str, least: int, default: int | None = None) -> int:
    value = record.get(name, default)
    if value is None and name not in record:
        raise ConfigError(f"{where}: {name} is missing; allowed: whole numbers from {least}")
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST_TOKENS:
        raise ConfigError(
            f"{where}: {name} is {str(value)[:40]}; allowed: whole numbers from {least} to {_MOST_TOKENS:,}"
        )
    return value


def _check(shape: SessionShape) -> None:
    counts: Iterable[tuple[str, int]] = (
        (name, getattr(shape, name)) for name in ("sessions", "turns", "first", "tool", "answer")
    )
    for name, count in counts:
        if not 1 <= count <= _MOST_TOKENS:
            raise ConfigError(f"{name} is {count}; allowed: 1 to {_MOST_TOKENS:,}")
    for name in ("system", "seed"):
        if not 0 <= getattr(shape, name) <= _MOST_TOKENS:
            raise ConfigError(f"{name} is {getattr(shape, name)}; allowed: 0 to {_MOST_TOKENS:,}")
    for name, most in (("think_s", _MOST_S), ("gap_s", _MOST_S), ("sigma", _MOST_SIGMA)):
        if not 0 <= getattr(shape, name) <= most:
            raise ConfigError(f"{name} is {getattr(shape, name)}; allowed: 0 to {most:,}")
