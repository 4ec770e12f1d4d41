"""Puts a prefill worker together from the shared runtime and this package's parts."""

from loopline.messages import Connect, CoordinatorMessage, Pair
from loopline.worker.runtime import RoleParts, WorkerContext
from prefill_worker.gate import PushGate
from prefill_worker.handoff_out import HandoffOut, PrefillPorts
from prefill_worker.service import DecodePeers, PrefillPeering


def build_role(context: WorkerContext, gate: PushGate) -> RoleParts:
    """The prefill role's core, service and pairing. `gate` is the one of the policy that the engine was made with."""

    def make_connect() -> Connect:
        return Connect(context.me(), context.fingerprint, context.endpoint.metadata)

    gate.peer_share = context.transfer.peer_share
    peers = DecodePeers(make_connect, context.to_engine, context.to_transfer, context.calls)
    ports = PrefillPorts(
        to_coordinator=context.to_coordinator,
        to_transfer=context.to_transfer,
        deliver_commit=peers.deliver_commit,
        identity=lambda: context.me().worker,
        entered=context.entered,
    )

    def on_message(message: CoordinatorMessage) -> bool:
        if isinstance(message, Pair):
            peers.connect(message.decode)
            return True
        return False

    servicer = PrefillPeering(ports.identity, context.to_engine)
    core = HandoffOut(context.engine, ports, context.clock, gate, context.endpoint.max_push_bytes)
    return RoleParts(core, servicer, on_message)
