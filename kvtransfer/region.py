"""A worker's arena as the transport sees it: registered once, described to writers by its manifest. The arena's tensor
itself belongs to the engine. Made by the transfer thread."""

from dataclasses import dataclass

from kvtransfer.agent import TransferAgent
from loopline.errors import InvariantBroken
from loopline.identity import RegionManifest

MEMORY_KINDS = ("DRAM", "VRAM")


@dataclass(frozen=True, kw_only=True)
class ArenaSpan:
    """Where an arena lies: `num_blocks` blocks of `block_bytes` bytes from `base_address`, then the null block."""

    base_address: int
    block_bytes: int
    num_blocks: int
    null_block: int
    memory_kind: str = "DRAM"
    """DRAM or VRAM."""
    device_id: int = 0

    def __post_init__(self) -> None:
        if self.memory_kind not in MEMORY_KINDS:
            raise InvariantBroken(f"memory kind {self.memory_kind!r} is none of {', '.join(MEMORY_KINDS)}")
        if self.base_address <= 0 or self.block_bytes <= 0 or self.num_blocks <= 0:
            raise InvariantBroken(f"not an arena: {self}")
        if self.null_block < self.num_blocks:
            raise InvariantBroken(f"null block {self.null_block} is one of the {self.num_blocks} blocks of the total")

    @property
    def num_bytes(self) -> int:
        """Bytes to register, null block included."""
        return (self.null_block + 1) * self.block_bytes


class RegisteredRegion:
    """An arena that an agent has registered.

    Invariant: registered from construction until the agent closes; the memory behind it must live that long, because a
    transport may land a write in it at any poll.
    """

    def __init__(self, agent: TransferAgent, span: ArenaSpan) -> None:
        agent.register(span.base_address, span.num_bytes, span.memory_kind, span.device_id)
        self.manifest = RegionManifest(
            base_address=span.base_address,
            num_blocks=span.num_blocks,
            block_bytes=span.block_bytes,
            memory_kind=span.memory_kind,
            device_id=span.device_id,
            null_block=span.null_block,
        )
