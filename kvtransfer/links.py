"""Links to workers that are written to: made once, warmed up, measured, and made again after they broke. Part of
the transfer thread; used by the sender."""

from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.agent import Handle, HandleState, HandleStatus, TransferAgent
from kvtransfer.commands import ConnectPeer, Event, PeerConnected, PeerConnectFailed
from kvtransfer.manifest import null_descriptors
from loopline.clock import Clock
from loopline.errors import TransferError
from loopline.identity import Peer, RegionManifest, WorkerId

WARM_UP_NOTICE = b"loopline-warm-up"
"""Rides on warm-up writes; receivers drop it."""
WARM_UP_BYTES = 4 << 20
MAX_WARM_UP_DESCRIPTORS = 1024
CHECK_S = 5.0
"""How long the write that checks a link may take where nothing else is in flight over it. After a network was away tcp
tries its connections again ever more seldom, up to two minutes apart; a new connection is there at once."""


@dataclass(slots=True, eq=False)
class Link:
    """A worker that can be written to: a decode worker, or for a fetch a prefill worker; once `is_ready`."""

    peer: Peer
    region: RegionManifest
    agent_name: str
    is_ready: bool = False
    is_broken: bool = False
    transport: str = ""
    bytes_per_s: float = 0.0


@dataclass(slots=True)
class _WarmUp:
    """The write that is in flight on a link without other traffic: of a new one the first opens the connection and the
    second is measured; `is_check`: of one that was ready, whether it still leads there."""

    link: Link
    command: ConnectPeer
    handle: Handle
    is_measured: bool
    is_check: bool
    num_bytes: int
    began_s: float


class Links:
    """Every link of one agent, by the peer's agent name.

    Invariants: a peer is added once until its link is removed; a link is ready only after a warm-up write whose handle
    is DONE, and after each further connect only once such a write has ended again: its peer was away. A broken link is
    removed only when it is made anew and nothing is in flight over it that is not past its deadline, because removing
    it fails every handle; one that is only silent, when nothing at all is. Warm-up writes go from null block to null
    block, so they disturb nobody.
    """

    def __init__(
        self,
        agent: TransferAgent,
        region: RegionManifest,
        timeout_s: float,
        clock: Clock,
        emit: Callable[[Event], None],
        is_writing: Callable[[str], bool],
        has_flights: Callable[[str], bool],
    ) -> None:
        """`timeout_s`: how long a warm-up write of a new link may take. `is_writing` says whether a push is in flight
        to an agent and not past its deadline, `has_flights` whether any is."""
        self._agent = agent
        self._region = region
        self._timeout_s = timeout_s
        self._clock = clock
        self._emit = emit
        self._is_writing = is_writing
        self._has_flights = has_flights
        self._reconnects: dict[str, ConnectPeer] = {}
        self._links: dict[str, Link] = {}
        self._warm_ups: dict[str, _WarmUp] = {}
        self._abandoned: list[Handle] = []  # warm-up writes that took too long; they touch null blocks only

    @property
    def is_busy(self) -> bool:
        """Is a warm-up in flight that should end soon?"""
        return any(not warm_up.is_check for warm_up in self._warm_ups.values())

    def ready_link(self, worker: WorkerId) -> Link | None:
        """The link to this worker's process, if it may be used."""
        link = self._links.get(worker.agent_name)
        return link if link is not None and link.is_ready else None

    def connect(self, command: ConnectPeer) -> None:
        """Add and warm up, or check a link that is ready and then repeat the answer. A broken one is made anew as soon
        as nothing is in flight over it but what is past its deadline."""
        name = command.peer.worker.agent_name
        known = self._links.get(name)
        if known is not None and known.is_broken:
            if self._is_writing(name):
                self._reconnects[name] = command
                return
            self._drop(name)
        elif known is not None:
            known.peer = command.peer
            if known.is_ready:
                self._check(known, command)
            return
        try:
            if command.region.block_bytes != self._region.block_bytes:
                raise TransferError(
                    f"a block has {self._region.block_bytes} bytes here and {command.region.block_bytes} there"
                )
            added = self._agent.add_peer(command.metadata)
            if added != name:
                self._agent.remove_peer(added)
                raise TransferError(f"the metadata is of agent {added}, not of {name}")
            link = Link(command.peer, command.region, name)
            self._links[name] = link
            self._post(link, command)
        except TransferError as error:
            self._drop(name)
            self._emit(PeerConnectFailed(command.peer, str(error)))

    def _check(self, link: Link, command: ConnectPeer) -> None:
        """Not ready until one more write is DONE: requests are not to wait for a link that is still silent."""
        link.is_ready = False
        try:
            self._post(link, command, is_check=True)
        except TransferError as error:
            self.broke(link, str(error))

    def broke(self, link: Link, reason: str) -> None:
        """A write over this link ended in an error: it takes no more handoffs, and the next connect makes it anew."""
        if not link.is_broken and self._links.get(link.agent_name) is link:
            link.is_ready, link.is_broken = False, True
            self._emit(PeerConnectFailed(link.peer, reason))

    def remove(self, worker: WorkerId) -> None:
        """Drop the link, if there is one: whatever is in flight over it fails."""
        self._reconnects.pop(worker.agent_name, None)
        self._drop(worker.agent_name)

    def poll(self) -> None:
        """Move every warm-up on."""
        for name, warm_up in list(self._warm_ups.items()):
            status = self._agent.poll(warm_up.handle)
            if status.is_terminal:
                del self._warm_ups[name]
                self._agent.release(warm_up.handle)
                self._warm_up_ended(warm_up, status)
            elif warm_up.is_check:
                self._make_silent_link_anew(name, warm_up)
            elif self._clock.now_s() - warm_up.began_s > self._timeout_s:
                del self._warm_ups[name]
                self._abandoned.append(warm_up.handle)
                self.broke(warm_up.link, f"no answer to the warm-up write in {self._timeout_s:g} s")
        for handle in [handle for handle in self._abandoned if self._agent.poll(handle).is_terminal]:
            self._abandoned.remove(handle)
            self._agent.release(handle)
        for name in [name for name in self._reconnects if not self._is_writing(name)]:
            self.connect(self._reconnects.pop(name))

    def _make_silent_link_anew(self, name: str, warm_up: _WarmUp) -> None:
        """If it has been so for long. With pushes in flight it is waited for: to give them up would be to lose the
        blocks on both sides until one of the processes ends."""
        if self._has_flights(name):
            warm_up.began_s = self._clock.now_s()
        elif self._clock.now_s() - warm_up.began_s > CHECK_S:
            self._drop(name)
            self.connect(warm_up.command)

    def _warm_up_ended(self, warm_up: _WarmUp, status: HandleStatus) -> None:
        link = warm_up.link
        if status.state is HandleState.FAILED:
            self.broke(link, f"the warm-up write failed: {status.reason}")
        elif warm_up.is_check:
            link.is_ready = True
            self._emit(PeerConnected(link.peer, link.transport, link.bytes_per_s))
        elif warm_up.is_measured:
            seconds = max(self._clock.now_s() - warm_up.began_s, 1e-9)
            link.transport = self._agent.transport_name(link.agent_name)
            link.bytes_per_s = warm_up.num_bytes / seconds
            link.is_ready = True
            self._emit(PeerConnected(link.peer, link.transport, link.bytes_per_s))
        else:
            try:
                self._post(link, warm_up.command, is_measured=True)
            except TransferError as error:
                self.broke(link, str(error))

    def _post(self, link: Link, command: ConnectPeer, *, is_measured: bool = False, is_check: bool = False) -> None:
        repeats = 1
        if is_measured:
            repeats = max(1, min(MAX_WARM_UP_DESCRIPTORS, WARM_UP_BYTES // self._region.block_bytes))
        local = null_descriptors(self._region, repeats)
        began_s = self._clock.now_s()
        handle = self._agent.post_write(link.agent_name, local, null_descriptors(link.region, repeats), WARM_UP_NOTICE)
        self._warm_ups[link.agent_name] = _WarmUp(
            link, command, handle, is_measured, is_check, local.num_bytes, began_s
        )

    def _drop(self, name: str) -> None:
        warm_up = self._warm_ups.pop(name, None)
        if warm_up is not None:
            self._abandoned.append(warm_up.handle)
        if self._links.pop(name, None) is not None:
            self._agent.remove_peer(name)
