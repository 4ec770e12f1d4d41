"""Faults that a worker commits on purpose, for tests of a whole cluster: the `faults` section of a cluster's YAML.

Here: what an entry may say and how it is checked. `kvtransfer.faulty_agent` commits those of the transport,
`loopline.worker.faults` those of messages and processes. No torch: the coordinator reads the section too.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

from loopline.schema_words import cross_error, cross_fault, key_text, shown
from loopline.settings import FaultSettings

PUSH_KINDS = ("fail_push", "fail_handle", "corrupt_push", "delay_push", "drop_push")
NOTICE_KINDS = ("drop_notice", "repeat_notice", "reorder_notices")
TRANSPORT_KINDS = (*PUSH_KINDS, *NOTICE_KINDS, "stop_polling")
MESSAGE_KINDS = ("drop_message", "repeat_message", "reorder_messages")
PROCESS_KINDS = ("freeze", "kill")
TIMED_KINDS = ("delay_push", "stop_polling")

KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("prefill", "decode"), (*PUSH_KINDS, *NOTICE_KINDS, "stop_polling", *MESSAGE_KINDS, *PROCESS_KINDS)
        ),
        "unified": (*MESSAGE_KINDS, *PROCESS_KINDS),
    }
)
"""What a worker of each role can do wrong. A prefill worker pushes handoffs and takes the notices of fetches, a decode
worker the other way round, a unified one does neither."""

PUSHING = "pushing"
"""A push was posted and has not been looked at since: no state of a table, but the moment that matters most."""

STATES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "prefill": (
            *("open", PUSHING, "committed", "closing", "drained", "closed", "failed"),
            *("fetching", "fetched"),
        ),
        "decode": (
            *("reserved", "bound", "local", "committed", "active", "quarantined", "closed"),
            *("lending", PUSHING),
        ),
        "unified": ("reserved", "local", "closed"),
    }
)
"""States of a handoff, by role, in the words of the send and the receive table; and of a fetch."""

_OF_ALL = ("RequestFailed", "PrefixReport", "Cancel", "PeerGone", "Drain", "ReportPrefixes")
MESSAGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "prefill": ("PairReady", "PairFailed", "Prefilled", "Pair", "StartPrefill", *_OF_ALL),
        "decode": (
            *("Reserved", "Granted", "LocalPrefillStarted", "StepTokens"),
            *("Reserve", "Bind", "StartLocalPrefill", *_OF_ALL),
        ),
        "unified": ("Reserved", "LocalPrefillStarted", "StepTokens", "Reserve", "StartLocalPrefill", *_OF_ALL),
    }
)
"""Types of messages between a worker of each role and its coordinator, both ways. Greetings and heartbeats are left
out: who wants to silence a worker freezes it."""

ANY_WORKER = "*"
"""In place of a worker's name, where a prompt token is given: each worker that there is or will be."""

_WHOLE = "a whole number, at least 1"
_SHAPES = {
    "worker": f"the name of a launched worker, or {ANY_WORKER!r}",
    "do": ", ".join((*TRANSPORT_KINDS, *MESSAGE_KINDS, *PROCESS_KINDS)),
    "at": f"{_WHOLE}, or a handoff's state",
    "nth": _WHOLE,
    "times": _WHOLE,
    "seconds": "a number, above 0",
    "rate": "a number, above 0, at most 1",
    "seed": "a whole number, at least 0",
    "message": "the name of a message's type",
    "prompt_token": "a token id: a whole number, at least 0",
}
_Fault = tuple[str, object, str]


class FaultConfig(BaseModel):
    """One fault: `worker` does `do` when it gets to `at`, or again and again at `rate` or with
    `prompt_token`. Frozen, no unknown keys, no silent conversion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    worker: str
    """The worker that commits it; `*` for each one, where a prompt token is given."""
    do: str
    """Its kind."""
    at: Annotated[int, Field(ge=1)] | str = 1
    """Which push, notice, message of the type or step of the engine, counted from 1; or a handoff's state."""
    nth: Annotated[int, Field(ge=1)] = 1
    """Where `at` is a state: which handoff that enters it, counted from 1."""
    times: Annotated[int, Field(ge=1)] = 1
    """How many in a row, from there on."""
    seconds: Annotated[float, Field(gt=0)] | None = None
    """How long a delay lasts."""
    message: str | None = None
    """The type of message that is meant."""
    rate: Annotated[float, Field(gt=0, le=1)] | None = None
    """In place of `at` and `times`: the probability with which each push, notice or message of the type is met."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Where a rate is given: the same seed draws the same pushes, notices or messages."""
    prompt_token: Annotated[int, Field(ge=0)] | None = None
    """In place of `at` and `times`: the token id that a request's prompt must hold. It is met with the first step that
    computes something of such a request, whichever it is."""

    def settings(self) -> FaultSettings:
        """What the worker's parts need of it."""
        is_state = isinstance(self.at, str)
        return FaultSettings(
            do=self.do,
            at=self.at if isinstance(self.at, int) else self.nth,
            state=str(self.at) if is_state else "",
            times=self.times,
            seconds=self.seconds or 0.0,
            message=self.message or "",
            rate=self.rate or 0.0,
            seed=self.seed,
            prompt_token=self.prompt_token,
        )


def read_faults(value: object) -> list[FaultConfig]:
    """The entries of a `faults` section. Raises an error that names the entry, the key, the value and what is
    allowed."""
    if not isinstance(value, list):
        raise _error("faults", value, f"a list of mappings with the keys {_keys()}")
    return [_read(f"faults.{index}", entry) for index, entry in enumerate(value)]


FaultList = Annotated[list[FaultConfig], PlainValidator(read_faults)]


def check_workers(faults: list[FaultConfig], replicas: Mapping[str, int]) -> None:
    """Whether every fault can happen in a cluster of so many workers by role. Raises as `read_faults` does."""
    roles = {f"{role}-{index}": role for role, count in replicas.items() for index in range(count)}
    for index, fault in enumerate(faults):
        is_for_all = fault.worker == ANY_WORKER and fault.prompt_token is not None
        if fault.worker not in roles and not is_for_all:
            allowed = (*roles, ANY_WORKER) if fault.prompt_token is not None else roles
            raise _error(f"faults.{index}.worker", fault.worker, ", ".join(allowed))
        meant = replicas if is_for_all else (roles[fault.worker],)
        wrong = next((found for role in meant if (found := _wrong(fault, role)) is not None), None)
        if wrong is not None:
            raise _error(f"faults.{index}.{wrong[0]}", wrong[1], wrong[2])


def faults_of(faults: list[FaultConfig], worker: str) -> tuple[FaultSettings, ...]:
    """What one worker does wrong."""
    return tuple(fault.settings() for fault in faults if fault.worker in (worker, ANY_WORKER))


def _read(place: str, entry: object) -> FaultConfig:
    if not isinstance(entry, dict | FaultConfig):
        raise _error(place, entry, f"a mapping with the keys {_keys()}")
    try:
        return FaultConfig.model_validate(entry)
    except ValidationError as error:
        found: Any = error.errors(include_url=False)[0]
        key = str(found["loc"][0])
        if found["type"] in ("extra_forbidden", "invalid_key"):
            raise cross_error(f"{place}.{key_text(key)}: no such key; allowed: {_keys()}") from None
        if found["type"] == "missing":
            raise cross_error(f"{place}.{key} is missing; needed: {_SHAPES[key]}") from None
        raise _error(f"{place}.{key}", found["input"], _SHAPES[key]) from None


def _wrong(fault: FaultConfig, role: str) -> _Fault | None:
    """(key, value, what is allowed) of the first key that does not fit the others or the worker's role."""
    if fault.do not in KINDS[role]:
        return "do", fault.do, f"{', '.join(KINDS[role])} (of a {role} worker)"
    wrong_token = _wrong_prompt_token(fault)
    if wrong_token is not None:
        return wrong_token
    if isinstance(fault.at, str):
        if fault.do not in PROCESS_KINDS:
            return "at", fault.at, f"{_WHOLE} (for {fault.do})"
        if fault.at not in STATES[role]:
            return "at", fault.at, f"{_WHOLE} (a step), or {', '.join(STATES[role])}"
    elif fault.nth != 1:
        return "nth", fault.nth, "1, or more where `at` is a state"
    if fault.do == "kill" and fault.times != 1:
        return "times", fault.times, "1 (for kill)"
    wrong_rate = _wrong_rate(fault)
    if wrong_rate is not None:
        return wrong_rate
    if (fault.seconds is None) == (fault.do in TIMED_KINDS):
        wanted = "a number, above 0" if fault.do in TIMED_KINDS else "null"
        return "seconds", fault.seconds, f"{wanted} (for {fault.do})"
    if fault.do in MESSAGE_KINDS and fault.message not in MESSAGES[role]:
        return "message", fault.message, f"{', '.join(MESSAGES[role])} (of a {role} worker)"
    if fault.do not in MESSAGE_KINDS and fault.message is not None:
        return "message", fault.message, f"null (for {fault.do})"
    return None


def _wrong_prompt_token(fault: FaultConfig) -> _Fault | None:
    """The same of a prompt token, and of the keys that it takes the place of."""
    if fault.prompt_token is None:
        return None
    if fault.do not in PROCESS_KINDS:
        return "prompt_token", fault.prompt_token, f"null (for {fault.do})"
    for key in ("at", "nth", "times", "rate"):
        if key in fault.model_fields_set:
            return key, getattr(fault, key), "no such key where a prompt token is given"
    return None


def _wrong_rate(fault: FaultConfig) -> _Fault | None:
    """The same of a fault's rate, and of the keys that a rate takes the place of."""
    if fault.rate is None:
        return None if "seed" not in fault.model_fields_set else ("seed", fault.seed, "a key where a rate is given")
    if fault.do in PROCESS_KINDS:
        return "rate", fault.rate, f"null (for {fault.do})"
    for key in ("at", "times"):
        if key in fault.model_fields_set:
            return key, getattr(fault, key), "no such key where a rate is given"
    return None


def _error(key: str, value: object, allowed: str) -> PydanticCustomError:
    return cross_fault(key, shown(value), allowed)


def _keys() -> str:
    return ", ".join(FaultConfig.model_fields)
