"""The `faults` section: what it may say, and what a worker's parts do with it."""

import logging
import signal
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from kvtransfer.agent import TransferAgent
from kvtransfer.faulty_agent import FaultyAgent
from kvtransfer.handoff import ReceiveState, SendState
from kvtransfer.local_agent import LocalAgent, LocalHub
from loopline.config import load_config
from loopline.errors import ConfigError
from loopline.faults import KINDS, MESSAGES, PUSHING, STATES
from loopline.fetch_messages import FetchState
from loopline.identity import Cause, HandoffKey, Peer, WorkerId
from loopline.messages import Cancel, CoordinatorMessage, PairFailed, PairReady, Reserve, StartPrefill, WorkerMessage
from loopline.request import Request, SamplingParams
from loopline.settings import FaultSettings
from loopline.worker.engine_thread import WorkerCore
from loopline.worker.faults import WorkerFaults
from loopline.worker.main import parse_worker_arguments
from tests.unit.worker.clocks import OwnClock

KEY = HandoffKey("r", 1)
TOKEN: dict[str, object] = {"worker": "*", "do": "kill", "prompt_token": 7}
RATE: dict[str, object] = {"worker": "decode-0", "do": "drop_notice", "rate": 0.5}


def write(folder: Path, *faults: object) -> str:
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({"model": {"path": "m"}, "faults": list(faults)}), encoding="utf-8")
    return str(path)


def parse(path: str, role: str, *more: str) -> tuple[FaultSettings, ...]:
    arguments = ["--config", path, "--coordinator", "127.0.0.1:1", "--name", f"{role}-0", *more]
    return parse_worker_arguments(role, arguments).settings.faults


# ---- the section -----------------------------------------------------------------------------------------------------


def test_each_worker_gets_its_own_faults(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"worker": "prefill-0", "do": "delay_push", "at": 2, "seconds": 1.5, "times": 3},
        {"worker": "decode-0", "do": "drop_message", "message": "Granted"},
        {"worker": "decode-0", "do": "kill", "at": "bound", "nth": 2},
        {"worker": "decode-0", "do": "freeze", "at": 7},
        {"worker": "prefill-0", "do": "drop_push", "rate": 0.05, "seed": 3},
    )
    assert parse(path, "prefill") == (
        FaultSettings(do="delay_push", at=2, seconds=1.5, times=3),
        FaultSettings(do="drop_push", rate=0.05, seed=3),
    )
    assert parse(path, "decode") == (
        FaultSettings(do="drop_message", message="Granted"),
        FaultSettings(do="kill", at=2, state="bound"),
        FaultSettings(do="freeze", at=7),
    )
    assert parse(path, "decode", "--without-faults") == ()
    assert parse(path, "prefill", "--without-faults") == (FaultSettings(do="drop_push", rate=0.05, seed=3),)


def test_a_prompt_token_holds_for_every_life_of_whom_it_names(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"worker": "*", "do": "kill", "prompt_token": 0},
        {"worker": "decode-0", "do": "freeze", "prompt_token": 9},
    )
    kill, freeze = FaultSettings(do="kill", prompt_token=0), FaultSettings(do="freeze", prompt_token=9)
    assert parse(path, "prefill", "--without-faults") == parse(path, "prefill") == (kill,)
    assert parse(path, "decode", "--without-faults") == parse(path, "decode") == (kill, freeze)
    assert load_config(path).worker_settings("decode", "decode-7", "127.0.0.1:1").faults == (kill,)


def test_there_are_none_by_default(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("model: {path: m}\n", encoding="utf-8")
    assert parse(str(path), "decode") == ()


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"worker": "decode-1", "do": "kill"}, "faults.0.worker is 'decode-1'; allowed: prefill-0, decode-0"),
        ({"worker": "decode-0", "do": "explode"}, "faults.0.do is 'explode'; allowed: fail_push, "),
        ({"worker": "prefill-0", "do": "drop_notices"}, "faults.0.do is 'drop_notices'; allowed: fail_push, "),
        (
            {"worker": "decode-0", "do": "kill", "at": "open"},
            "faults.0.at is 'open'; allowed: a whole number, at least",
        ),
        ({"worker": "prefill-0", "do": "fail_push", "at": "open"}, "faults.0.at is 'open'; allowed: a whole number"),
        ({"worker": "decode-0", "do": "kill", "at": 0}, "faults.0.at is 0; allowed: a whole number, at least 1, or a"),
        ({"worker": "decode-0", "do": "kill", "at": 1.5}, "faults.0.at is 1.5; allowed: a whole number"),
        ({"worker": "decode-0", "do": "kill", "at": 3, "nth": 2}, "faults.0.nth is 2; allowed: 1, or more where"),
        ({"worker": "decode-0", "do": "kill", "times": 2}, "faults.0.times is 2; allowed: 1 (for kill)"),
        ({"worker": "decode-0", "do": "stop_polling"}, "faults.0.seconds is None; allowed: a number, above 0 (for "),
        ({"worker": "decode-0", "do": "kill", "seconds": 1.0}, "faults.0.seconds is 1.0; allowed: null (for kill)"),
        ({"worker": "decode-0", "do": "drop_message"}, "faults.0.message is None; allowed: Reserved, "),
        (
            {"worker": "decode-0", "do": "drop_message", "message": "Prefilled"},
            "faults.0.message is 'Prefilled'; allowed: Reserved, ",
        ),
        (
            {"worker": "decode-0", "do": "kill", "message": "Reserve"},
            "faults.0.message is 'Reserve'; allowed: null (for kill)",
        ),
        ({"worker": "decode-0"}, "faults.0.do is missing; needed: fail_push, "),
        ({"worker": "decode-0", "do": "kill", "when": 1}, "faults.0.when: no such key; allowed: worker, do, at, "),
        (RATE | {"rate": 0.0}, "faults.0.rate is 0.0; allowed: a number, above 0, at most 1"),
        (RATE | {"rate": 1.5}, "faults.0.rate is 1.5; allowed: a number, above 0, at most 1"),
        (RATE | {"rate": "often"}, "faults.0.rate is 'often'; allowed: a number, above 0, at most 1"),
        (RATE | {"seed": -1}, "faults.0.seed is -1; allowed: a whole number, at least 0"),
        (RATE | {"seed": 1.5}, "faults.0.seed is 1.5; allowed: a whole number, at least 0"),
        (RATE | {"at": 1}, "faults.0.at is 1; allowed: no such key where a rate is given"),
        (RATE | {"times": 2}, "faults.0.times is 2; allowed: no such key where a rate is given"),
        (RATE | {"nth": 2}, "faults.0.nth is 2; allowed: 1, or more where"),
        (RATE | {"do": "kill"}, "faults.0.rate is 0.5; allowed: null (for kill)"),
        (RATE | {"rate": None, "seed": 1}, "faults.0.seed is 1; allowed: a key where a rate is given"),
        ("kill", "faults.0 is 'kill'; allowed: a mapping with the keys worker, "),
        (TOKEN | {"prompt_token": -1}, "faults.0.prompt_token is -1; allowed: a token id: a whole number, at least 0"),
        (TOKEN | {"prompt_token": "x"}, "faults.0.prompt_token is 'x'; allowed: a token id: a whole number"),
        (TOKEN | {"worker": "decode-1"}, "faults.0.worker is 'decode-1'; allowed: prefill-0, decode-0, *"),
        (TOKEN | {"prompt_token": None}, "faults.0.worker is '*'; allowed: prefill-0, decode-0"),
        (TOKEN | {"do": "fail_push"}, "faults.0.prompt_token is 7; allowed: null (for fail_push)"),
        (TOKEN | {"do": "drop_notice", "worker": "decode-0"}, "faults.0.prompt_token is 7; allowed: null (for drop_n"),
        (TOKEN | {"at": 2}, "faults.0.at is 2; allowed: no such key where a prompt token is given"),
        (TOKEN | {"nth": 2}, "faults.0.nth is 2; allowed: no such key where a prompt token is given"),
        (TOKEN | {"times": 2}, "faults.0.times is 2; allowed: no such key where a prompt token is given"),
        (TOKEN | {"rate": 0.5}, "faults.0.rate is 0.5; allowed: no such key where a prompt token is given"),
        (TOKEN | {"seconds": 0.5}, "faults.0.seconds is 0.5; allowed: null (for kill)"),
    ],
)
def test_a_wrong_entry_is_refused_with_its_value_and_what_is_allowed(
    tmp_path: Path, fault: object, expected: str
) -> None:
    path = write(tmp_path, fault)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value).startswith(f"{path}: {expected}")


def test_a_section_that_is_no_list_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("model: {path: m}\nfaults: {worker: decode-0}\n", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"faults is \{'worker': 'decode-0'\}; allowed: a list of mappings with the keys"
    ):
        load_config(path)


def test_the_words_are_those_of_the_tables_and_messages() -> None:
    lending = {FetchState.LENDING.value}
    fetching = {state.value for state in FetchState} - lending
    assert set(STATES["prefill"]) == {state.value for state in SendState} | {PUSHING} | fetching
    assert set(STATES["decode"]) == {state.value for state in ReceiveState} | {PUSHING} | lending
    spoken = {kind.__name__ for kind in (*typing.get_args(WorkerMessage), *typing.get_args(CoordinatorMessage))}
    named = set(MESSAGES["prefill"]) | set(MESSAGES["decode"])
    assert spoken - named == {"Register", "Welcome", "Rejected", "Heartbeat"}
    assert named <= spoken
    assert KINDS.keys() == STATES.keys() == MESSAGES.keys()


@pytest.mark.parametrize("rate", [0.05, 0.5, 1.0])
def test_a_rate_meets_that_part_of_all_events(rate: float) -> None:
    def met(seed: int, do: str = "drop_message", message: str = "Granted") -> list[int]:
        fault = FaultSettings(do=do, message=message, rate=rate, seed=seed)
        numbers = [number for number in range(1, 10_001) if fault.is_due(number)]
        assert numbers == [number for number in reversed(range(1, 10_001)) if fault.is_due(number)][::-1]
        return numbers

    assert len(met(0)) == pytest.approx(10_000 * rate, rel=0.1)
    assert met(0) == met(0)
    if rate < 1:
        draws = [met(0), met(1), met(0, do="repeat_message"), met(0, message="Reserved")]
        assert all(draws.count(draw) == 1 for draw in draws)


# ---- what is done with it --------------------------------------------------------------------------------------------


def request_of(request_id: str, *prompt_ids: int) -> Request:
    return Request(request_id=request_id, prompt_ids=prompt_ids, params=SamplingParams(loops=4), generated_ids=(7,))


def start_of(request_id: str, *prompt_ids: int) -> StartPrefill:
    target = Peer(WorkerId("d", 1), "decode-0", "127.0.0.1:1")
    return StartPrefill(HandoffKey(request_id, 1), request_of(request_id, *prompt_ids), target, 0, (), 1.0)


def reserve_of(request_id: str, *prompt_ids: int) -> Reserve:
    return Reserve(HandoffKey(request_id, 1), request_of(request_id, *prompt_ids), 1.0)


class Signals:
    """Takes what a process would send to itself."""

    def __init__(self) -> None:
        self.sent: list[signal.Signals] = []

    def faults(self, *faults: FaultSettings) -> WorkerFaults:
        return WorkerFaults("decode-0", faults, OwnClock(), self.sent.append)


def make_agent() -> TransferAgent:
    return LocalAgent("any", LocalHub())


def test_what_no_fault_meets_is_not_wrapped() -> None:
    faults = Signals().faults(FaultSettings(do="kill", state="bound"))
    agent, core, send = make_agent(), cast(WorkerCore, SimpleNamespace()), cast(Any, print)
    assert faults.agent(agent) is agent
    assert faults.core(core) is core
    assert faults.messages(send) is send


def test_a_worker_names_its_faults_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Signals().faults(
            FaultSettings(do="delay_push", at=2, times=2, seconds=1.5),
            FaultSettings(do="drop_message", message="Granted"),
            FaultSettings(do="kill", at=3, state="bound"),
            FaultSettings(do="delay_push", rate=0.05, seconds=0.5),
            FaultSettings(do="kill", prompt_token=7),
        )
    (record,) = caplog.records
    expected = "delay_push at 2 to 3 for 1.5 s; drop_message Granted at 1; kill at bound 3; "
    expected += "delay_push at a rate of 0.05 for 0.5 s; kill with prompt token 7"
    assert record.getMessage() == f"decode-0 commits faults on purpose: {expected}"


def test_a_signal_comes_with_the_handoff_that_is_meant() -> None:
    signals = Signals()
    faults = signals.faults(
        FaultSettings(do="freeze", at=2, state="bound", times=2), FaultSettings(do="kill", state="active")
    )
    for state in ("reserved", "bound"):
        faults.entered(state)
    assert signals.sent == []
    for _ in range(4):
        faults.entered("bound")
    assert signals.sent == [signal.SIGSTOP, signal.SIGSTOP]
    faults.entered("active")
    assert signals.sent[2:] == [signal.SIGKILL]


def test_a_signal_comes_with_the_step_that_is_meant_before_anybody_hears_of_it() -> None:
    signals = Signals()
    order: list[object] = []
    signals.sent = cast(Any, order)
    inner = SimpleNamespace(handle=order.append, tick=order.clear, is_draining=True, handoffs=lambda: (("bound", 1),))
    inner.stepped, inner.ignored = (lambda outcome: order.append(outcome.step)), lambda: (("stale", 2),)
    core = signals.faults(FaultSettings(do="kill", at=2)).core(cast(WorkerCore, inner))
    for step in (1, 2, 3):
        core.stepped(cast(Any, SimpleNamespace(step=step)))
    assert order == [1, signal.SIGKILL, 2, 3]
    core.handle("event")
    assert order[-1] == "event"
    assert (core.is_draining, core.handoffs(), core.ignored()) == (True, (("bound", 1),), (("stale", 2),))


@pytest.mark.parametrize("part", ["chunks", "rows"])
@pytest.mark.parametrize("give", [start_of, reserve_of], ids=["prefill", "decode"])
def test_a_signal_comes_with_the_first_step_of_a_request_whose_prompt_has_the_token(give: Any, part: str) -> None:
    """The core has the request by then, and does not hear of the step first."""
    signals = Signals()
    order: list[object] = []
    signals.sent = cast(Any, order)
    inner = SimpleNamespace(handle=order.append, tick=order.clear)
    inner.stepped = lambda outcome: order.append(outcome.step)
    core = signals.faults(FaultSettings(do="kill", prompt_token=7)).core(cast(WorkerCore, inner))

    def step(number: int, *request_ids: str) -> None:
        parts = tuple(SimpleNamespace(request_id=request_id) for request_id in request_ids)
        core.stepped(cast(Any, SimpleNamespace(**{"step": number, "chunks": (), "rows": (), part: parts})))

    events = [give("other", 6, 8), give("met", 6, 7), give("waits", 7)]
    for event in events:
        core.handle(event)
    step(1, "other")
    step(2)
    step(3, "other", "met")
    step(4, "met", "other")
    assert order == [*events, 1, 2, signal.SIGKILL, 3, 4]


def test_the_moment_of_pushing_needs_the_transport() -> None:
    faults = Signals().faults(FaultSettings(do="kill", state=PUSHING))
    assert isinstance(faults.agent(make_agent()), FaultyAgent)


def ready(number: int) -> PairReady:
    return PairReady(WorkerId("d", number), "tcp", 1.0)


FAILED = PairFailed(WorkerId("d", 9), "no")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("drop_message", [ready(1), FAILED, ready(3)]),
        ("repeat_message", [ready(1), ready(2), ready(2), FAILED, ready(3)]),
        ("reorder_messages", [ready(1), FAILED, ready(2), ready(3)]),
    ],
)
def test_messages_that_are_lost_repeated_or_swapped(kind: str, expected: list[WorkerMessage]) -> None:
    heard: list[WorkerMessage] = []
    faults = Signals().faults(FaultSettings(do=kind, at=2, message="PairReady"))
    send = faults.messages(heard.append)
    sent: list[WorkerMessage] = [ready(1), ready(2), FAILED, ready(3)]
    for message in sent:
        send(message)
    assert heard == expected


def test_messages_at_a_rate() -> None:
    heard: list[WorkerMessage] = []
    fault = FaultSettings(do="drop_message", message="PairReady", rate=0.5)
    send = Signals().faults(fault).messages(heard.append)
    for number in range(1, 41):
        send(ready(number))
    assert heard == [ready(number) for number in range(1, 41) if not fault.is_due(number)]
    assert 5 < len(heard) < 35


def test_each_direction_counts_for_itself() -> None:
    up: list[WorkerMessage] = []
    down: list[CoordinatorMessage] = []
    faults = Signals().faults(FaultSettings(do="drop_message", message="Cancel"))
    send, take = faults.messages(up.append), faults.messages(down.append)
    send(FAILED)
    for _ in range(2):
        take(Cancel(KEY, Cause.CANCELLED))
    assert (up, down) == ([FAILED], [Cancel(KEY, Cause.CANCELLED)])
