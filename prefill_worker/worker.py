"""Puts a prefill worker together from the shared runtime and this package's parts."""

from loopline.fetch_messages import FetchPrefix
from loopline.identity import Peer
from loopline.messages import Connect, CoordinatorMessage, Pair, PeerGone
from loopline.worker.runtime import RoleParts, WorkerContext
from loopline.worker.writers import Writers
from prefill_worker.fetch_in import Wanted
from prefill_worker.gate import PushGate
from prefill_worker.handoff_out import HandoffOut
from prefill_worker.outgoing import PrefillPorts
from prefill_worker.service import DecodePeers, PrefillPeering


def build_role(context: WorkerContext, gate: PushGate) -> RoleParts:
    """The prefill role's core, service and pairing. `gate` is the one of the policy that the engine was made with."""

    def make_connect() -> Connect:
        return Connect(context.me(), context.fingerprint, context.endpoint.metadata)

    gate.peer_share = context.transfer.peer_share
    peers = DecodePeers(make_connect, context.to_engine, context.to_transfer, context.calls)
    writers = Writers(context.to_engine, context.calls)

    def ask_prefix(source: Peer, wanted: Wanted) -> None:
        metadata, region = context.endpoint.metadata, context.endpoint.region
        fetch = FetchPrefix(wanted.key, context.me(), metadata, region, wanted.first_block, wanted.runs, wanted.limit_s)
        peers.ask_prefix(source, fetch)

    ports = PrefillPorts(
        to_coordinator=context.to_coordinator,
        to_transfer=context.to_transfer,
        deliver_commit=peers.deliver_commit,
        ask_prefix=ask_prefix,
        ask_close=writers.ask_close,
        identity=lambda: context.me().worker,
        entered=context.entered,
    )

    def on_message(message: CoordinatorMessage) -> bool:
        if isinstance(message, Pair):
            peers.connect(message.decode)
            return True
        if isinstance(message, PeerGone) and message.proven:
            writers.forget(message.worker)
        return False

    servicer = PrefillPeering(ports.identity, context.to_engine)
    timeout_s, most_bytes = context.transfer.push_timeout_s, context.endpoint.max_push_bytes
    core = HandoffOut(context.engine, ports, context.clock, gate, most_bytes, timeout_s)
    return RoleParts(core, servicer, on_message)
