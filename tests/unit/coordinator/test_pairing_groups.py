"""Who is paired with whom: each field of a real fingerprint keeps workers apart when it alone differs, and is named;
and so do addresses that could never reach each other."""

import asyncio
import logging
from typing import Any, NoReturn

import grpc
import pytest

from coordinator.registry import Joined, Refused, Registry
from coordinator.render import waits_for
from coordinator.snapshot import WorkerView
from decode_worker.service import DecodePeering
from loopline.engine.engine import Engine
from loopline.identity import Fingerprint, RegionManifest, Role
from loopline.messages import Connect, Connected, PairFailed, PairReady
from loopline.settings import EngineSettings
from loopline.wire import convert
from prefill_worker.policy import PrefillPolicy
from tests.support.golden import GOLDEN
from tests.unit.coordinator.builders import OTHER_FINGERPRINT, peer, register

FINGERPRINT = Engine(
    EngineSettings(model_path=str(GOLDEN / "ouro_fp32"), block_size=4, num_blocks=8), PrefillPolicy()
).fingerprint()
FIELDS = [name for name, _ in FINGERPRINT.fields]


def varied(name: str) -> Fingerprint:
    """The fingerprint with one field changed."""
    return Fingerprint(tuple((key, "another" if key == name else value) for key, value in FINGERPRINT.fields))


def lacking(name: str) -> Fingerprint:
    """The fingerprint without one field, as a worker of another version may send it."""
    return Fingerprint(tuple((key, value) for key, value in FINGERPRINT.fields if key != name))


@pytest.mark.parametrize("make", [varied, lacking])
@pytest.mark.parametrize("name", FIELDS)
def test_a_worker_that_differs_in_one_field_stays_apart(name: str, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry(3.0)
    decode = register("decode-0", Role.DECODE, fingerprint=FINGERPRINT)
    prefill = register("prefill-0", Role.PREFILL, fingerprint=make(name))
    registry.join(decode, 0.0)
    with caplog.at_level(logging.WARNING):
        answer = registry.join(prefill, 0.0)
    assert answer == Joined(None, ())  # in, and paired with nobody
    assert f"{name}: " in caplog.text
    waiting = {view.peer.name: reason for view, reason in _waiting(registry)}
    assert f"a decode worker with the same KV (decode-0 differs in {name}: " in waiting["prefill-0"]
    assert f"a prefill worker with the same KV (prefill-0 differs in {name}: " in waiting["decode-0"]
    assert not registry.pair_ready(prefill.peer.worker, PairReady(decode.peer.worker, "tcp", 1.0))


def _waiting(registry: Registry) -> list[tuple[WorkerView, str]]:
    snapshot = registry.snapshot(0.0, {})
    return [(view, waits_for(view, snapshot)) for view in snapshot.workers]


def test_what_a_worker_waits_for_is_said_until_it_has_a_warm_link() -> None:
    registry = Registry(3.0)
    decode, prefill = register("decode-0", Role.DECODE), register("prefill-0", Role.PREFILL)
    registry.join(decode, 0.0)
    assert [reason for _, reason in _waiting(registry)] == ["a prefill worker"]
    registry.join(prefill, 0.0)
    reasons = ["a warm link with a prefill worker", "a warm link with a decode worker"]
    assert [reason for _, reason in _waiting(registry)] == reasons
    registry.pair_failed(prefill.peer.worker, PairFailed(decode.peer.worker, "no route"))
    assert dict(zip(("decode", "prefill"), (reason for _, reason in _waiting(registry)), strict=True)) == {
        "decode": "a warm link with a prefill worker",
        "prefill": "a warm link with a decode worker (the last try failed: no route)",
    }
    registry.pair_ready(prefill.peer.worker, PairReady(decode.peer.worker, "tcp", 1.0))
    assert [reason for _, reason in _waiting(registry)] == ["", ""]


class Aborted(Exception):
    """A gRPC call was refused."""


class Call:
    """The context of a gRPC call, as far as a refusal needs it."""

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise Aborted(code, details)


@pytest.mark.parametrize("name", FIELDS)
def test_a_decode_worker_refuses_a_writer_that_differs_in_one_field(name: str) -> None:
    """Also where the coordinator made the pair: nobody writes KV that the other one would read as something else."""
    region = RegionManifest(1 << 12, 4, 64, "DRAM", 0, 4)
    servicer = DecodePeering(lambda: Connected(peer("decode-0"), FINGERPRINT, b"meta", region), lambda event: None)
    connect: Any = convert.to_proto(Connect(peer("prefill-0"), varied(name), b"meta"))
    with pytest.raises(Aborted) as refused:
        asyncio.run(servicer.ConnectPeer(connect, Call()))
    code, details = refused.value.args
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert details.startswith(f"decode-0 and prefill-0 differ in {name}: ")


@pytest.mark.parametrize("loopback", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
@pytest.mark.parametrize("first", ["loopback", "network"])
def test_a_pair_across_machines_needs_addresses_that_reach_across(loopback: str, first: str) -> None:
    registry = Registry(3.0)
    near = register("prefill-0", Role.PREFILL, host=join_host(loopback))
    far = register("decode-0", Role.DECODE, host="10.0.0.7")
    order = (near, far) if first == "loopback" else (far, near)
    assert isinstance(registry.join(order[0], 0.0), Joined)
    answer = registry.join(order[1], 0.0)
    assert isinstance(answer, Refused) and not answer.retry
    assert near.peer.address in answer.reason and far.peer.address in answer.reason
    assert order[1].peer.worker not in registry


def test_addresses_of_one_kind_are_paired() -> None:
    for hosts in (("127.0.0.1", "localhost"), ("10.0.0.6", "node-7.example"), ("[::1]", "127.0.0.1")):
        registry = Registry(3.0)
        assert isinstance(registry.join(register("prefill-0", Role.PREFILL, host=hosts[0]), 0.0), Joined)
        answer = registry.join(register("decode-0", Role.DECODE, host=hosts[1]), 0.0)
        assert isinstance(answer, Joined) and len(answer.commands) == 1


def test_whoever_is_never_paired_may_listen_anywhere() -> None:
    registry = Registry(3.0)
    assert isinstance(registry.join(register("decode-0", Role.DECODE), 0.0), Joined)
    assert isinstance(registry.join(register("decode-1", Role.DECODE, host="10.0.0.7"), 0.0), Joined)
    stranger = register("prefill-0", Role.PREFILL, host="10.0.0.8", fingerprint=OTHER_FINGERPRINT)
    assert isinstance(registry.join(stranger, 0.0), Joined)


def join_host(host: str) -> str:
    """The host as it stands in HOST:PORT."""
    return f"[{host}]" if ":" in host else host
