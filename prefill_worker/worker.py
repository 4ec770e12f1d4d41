"""Puts a prefill worker together from the shared runtime and this package's parts."""

import grpc.aio

from loopline.messages import Connect, CoordinatorMessage, Pair
from loopline.worker.peer_calls import PeerCalls
from loopline.worker.runtime import RoleParts, WorkerContext
from prefill_worker.handoff_out import HandoffOut, PrefillPorts
from prefill_worker.service import DecodePeers, PrefillPeering, add_peering


def build_role(context: WorkerContext) -> RoleParts:
    """The prefill role's core, service and pairing."""

    def make_connect() -> Connect:
        return Connect(context.me(), context.fingerprint, context.endpoint.metadata)

    peers = DecodePeers(make_connect, context.to_engine, context.to_transfer, PeerCalls(context.loop))
    ports = PrefillPorts(
        to_coordinator=context.to_coordinator,
        to_transfer=context.to_transfer,
        deliver_commit=peers.deliver_commit,
        identity=lambda: context.me().worker,
    )
    servicer = PrefillPeering(ports.identity, context.to_engine)

    def add_services(server: grpc.aio.Server) -> None:
        add_peering(server, servicer)

    def on_message(message: CoordinatorMessage) -> bool:
        if isinstance(message, Pair):
            peers.connect(message.decode)
            return True
        return False

    return RoleParts(HandoffOut(context.engine, ports, context.clock), add_services, on_message)
