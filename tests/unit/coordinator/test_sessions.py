"""A session stays where its last turn ran."""

import asyncio
from dataclasses import replace

import pytest

from coordinator.policies import SessionAffinity
from coordinator.registry import Registry
from coordinator.router import Router
from coordinator.sessions import Sessions
from loopline.client import AsyncClient
from loopline.errors import InvalidRequest
from loopline.identity import Role, WorkerId
from loopline.messages import PairReady, Reserve
from loopline.request import MAX_SESSION_CHARS
from tests.unit.coordinator.builders import assigned, register, request
from tests.unit.coordinator.cluster import WAIT_S, scripted_cluster

P0, D0, D1 = register("prefill-0", Role.PREFILL), register("decode-0", Role.DECODE), register("decode-1", Role.DECODE)


def test_the_latest_sessions_are_remembered() -> None:
    sessions, worker = Sessions(2), WorkerId("w", 1)
    for name in ("a", "b", "", "a", "c"):
        sessions.placed(name, Role.DECODE, worker)
    assert len(sessions) == 2 and sessions.last("b", Role.DECODE) is None
    assert sessions.last("a", Role.DECODE) == worker and sessions.last("a", Role.PREFILL) is None
    assert sessions.last("", Role.DECODE) is None


def test_a_session_goes_to_the_worker_of_its_last_turn_while_that_has_room() -> None:
    registry, router = Registry(3.0), Router(SessionAffinity())
    for one in (P0, D0, D1):
        registry.join(one, 0.0)
    for one in (D0, D1):
        registry.pair_ready(P0.peer.worker, PairReady(one.peer.worker, "tcp", 1.0))
    turn = replace(request("r1"), session="s")
    busy = tuple(assigned(f"b{number}", token_loops=500) for number in range(3))
    placing = router.begin(registry.snapshot(0.0, {D0.peer.worker: busy}), 0.0)
    first = placing.choose_decode(turn)
    assert first is not None and first.peer.name == "decode-1"
    placing.placed(turn, {}, {first.worker: assigned("r1")})

    def next_turn(num_others: int, session: str = "s") -> str | None:
        table = {D1.peer.worker: tuple(assigned(f"o{n}", token_loops=900) for n in range(num_others))}
        view = router.begin(registry.snapshot(0.0, table), 0.0).choose_decode(replace(request("r2"), session=session))
        return view and view.peer.name

    assert next_turn(3) == "decode-1"  # whatever else it has to do
    assert next_turn(3, session="") == next_turn(3, session="other") == "decode-0"
    assert next_turn(4) == "decode-0"  # it is full


def test_a_session_travels_from_the_client_to_the_workers_and_is_bounded() -> None:
    async def main() -> None:
        async with asyncio.timeout(3 * WAIT_S), scripted_cluster() as cluster:
            _, decode = await cluster.pair()
            async with AsyncClient(cluster.address) as client:
                await client.complete("hello", max_tokens=2, session="s" * MAX_SESSION_CHARS)
                asked = decode.heard_of(Reserve)[-1]
                assert asked.request.session == "s" * MAX_SESSION_CHARS
                with pytest.raises(InvalidRequest, match="session has 257 characters; allowed: at most 256"):
                    await client.complete("hello", session="s" * 257)

    asyncio.run(main())
