"""Puts a decode worker together from the shared runtime and this package's parts."""

from decode_worker.handoff_in import DecodePorts, HandoffIn
from decode_worker.service import DecodePeering
from loopline.messages import Connected, CoordinatorMessage, PeerGone
from loopline.worker.runtime import RoleParts, WorkerContext
from loopline.worker.writers import Writers


def build_role(context: WorkerContext) -> RoleParts:
    """The decode role's core, service and questions to writers."""

    def make_connected() -> Connected:
        endpoint = context.endpoint
        return Connected(context.me(), context.fingerprint, endpoint.metadata, endpoint.region)

    writers = Writers(context.to_engine, context.calls)
    ports = DecodePorts(
        to_coordinator=context.to_coordinator,
        to_transfer=context.to_transfer,
        ask_close=writers.ask_close,
        identity=lambda: context.me().worker,
        entered=context.entered,
    )

    def on_message(message: CoordinatorMessage) -> bool:
        if isinstance(message, PeerGone) and message.proven:
            writers.forget(message.worker)
        return False  # the engine thread needs it too

    servicer = DecodePeering(make_connected, context.to_engine)
    timeout_s, most_bytes = context.transfer.push_timeout_s, context.endpoint.max_push_bytes
    return RoleParts(HandoffIn(context.engine, ports, context.clock, timeout_s, most_bytes), servicer, on_message)
