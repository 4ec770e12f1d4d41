"""Short ways to records that the coordinator's tests need, and a clock that only tests move."""

from coordinator.effects import Assigned
from loopline.identity import (
    BlockCounts,
    BlockRun,
    Capacity,
    Cause,
    Fingerprint,
    HandoffKey,
    Peer,
    Role,
    WorkerId,
    WorkerLoad,
)
from loopline.messages import (
    Granted,
    HandoffStats,
    Heartbeat,
    Prefilled,
    Register,
    RequestFailed,
    Reserved,
    StepTokens,
    TokenRow,
)
from loopline.request import FinishReason, Request, SamplingParams

FINGERPRINT = Fingerprint((("weights", "w1"), ("block_size", "16")))
OTHER_FINGERPRINT = Fingerprint((("weights", "w2"), ("block_size", "16")))
STATS = HandoffStats(pushes=1, descriptors=1, num_bytes=64, transport="scripted", prefill_s=0.01)


class VirtualClock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.s = 100.0

    def now_s(self) -> float:
        return self.s


def peer(name: str, epoch: int = 1) -> Peer:
    return Peer(WorkerId(f"uuid-{name}", epoch), name, f"127.0.0.1:{name}")


def register(
    name: str,
    role: Role,
    *,
    epoch: int = 1,
    uuid: str | None = None,
    fingerprint: Fingerprint = FINGERPRINT,
    total_blocks: int = 64,
    max_running: int = 4,
    pid: int = 1,
    host: str = "127.0.0.1",
    growth_share: float = 1.0,
) -> Register:
    worker = WorkerId(uuid or f"uuid-{name}", epoch)
    capacity = Capacity(16, total_blocks, max_running, token_bytes=1024, growth_share=growth_share)
    return Register(Peer(worker, name, f"{host}:{name}"), role, pid, fingerprint, capacity)


def heartbeat(*, draining: bool = False, step: int = 0, quarantined: int = 0) -> Heartbeat:
    blocks = BlockCounts(free=64 - quarantined, held=0, cached=0, quarantined=quarantined, total=64)
    load = WorkerLoad(step, False, 0, 0, 0, 0, blocks, handoffs=(), ignored=())
    return Heartbeat(load, draining)


def request(
    request_id: str = "r1", *, prompt: int = 5, max_tokens: int = 4, loops: int = 2, generated: tuple[int, ...] = ()
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, loops=loops)
    return Request(
        request_id=request_id, prompt_ids=tuple(range(1, prompt + 1)), params=params, generated_ids=generated
    )


def assigned(request_id: str, *, token_loops: int = 8, max_kv_tokens: int = 16, awaits: bool = False) -> Assigned:
    return Assigned(request_id, 5, max_kv_tokens, token_loops, awaits)


def row(
    request_id: str, position: int, token_id: int | None, *, attempt: int = 1, finish: FinishReason | None = None
) -> TokenRow:
    return TokenRow(request_id, attempt, position, token_id, depth=2, finish=finish)


def reserved(request_id: str, generation: int = 1, cause: Cause | None = None, detail: str = "") -> Reserved:
    return Reserved(HandoffKey(request_id, generation), cached_tokens=0, cause=cause, detail=detail)


def granted(request_id: str, writer: Peer, generation: int = 1, cause: Cause | None = None) -> Granted:
    return Granted(HandoffKey(request_id, generation), writer.worker, 0, (BlockRun(3, 1),), cause)


def prefilled(token: TokenRow, generation: int = 1) -> Prefilled:
    return Prefilled(HandoffKey(token.request_id, generation), token.attempt, token, STATS)


def failed(request_id: str, cause: Cause, generation: int = 1, detail: str = "why") -> RequestFailed:
    return RequestFailed(HandoffKey(request_id, generation), cause, detail)


def step(*rows: TokenRow) -> StepTokens:
    return StepTokens(1, rows)
