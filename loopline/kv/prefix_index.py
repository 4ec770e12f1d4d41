"""Which whole, written blocks are cached under which digest, which of them go first, and the news of both.

Knows nothing of tokens, requests or free blocks: `loopline.kv.ledger` does, counts references, and is the only caller.

    unknown --publish--> held --unpin--> cache-only --evict--> unknown (the block is free again)
                          ^`----pin--------'

Cached blocks form trees: a block hangs on the block before it. **Holders hold whole chains from the root**: who holds
a block holds every block before it. So what hangs on a cache-only block is cache-only too, every cache-only block can
be evicted in some order from the leaves up, and counting them is enough. One thing follows for the ledger: a request
whose copy was refused (`publish` gave False) does not hold the cached chain from there on. It must either change over
to the known block or publish no later block of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from loopline.errors import AuditFailed, InvariantBroken

_STALE_ALLOWED = 8  # stale heap entries that are not worth a rebuild, however small the index is


@dataclass(frozen=True)
class PrefixDelta:
    """What changed between states `number - 1` and `number`. A digest is in one of the two at most, and in neither if
    it came and went; parents are published before and evicted after their children."""

    number: int
    published: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


@dataclass(eq=False, slots=True)
class _Node:
    digest: bytes
    parent: "_Node | None"
    block_id: int
    order: int  # of publishing; unique
    is_held: bool = True
    last_used: int = 0  # when its last holder left; says nothing while it is held
    num_children: int = 0

    @property
    def can_go(self) -> bool:
        return not self.is_held and self.num_children == 0


class PrefixIndex:
    """Invariants: digests and blocks are one to one; a block's parent is cached; a held block's parent is held;
    `num_evictable` counts the blocks that are not held; every leaf among these has its entry in the heap. See `audit`.
    """

    def __init__(self, max_pending: int = 16_384) -> None:
        """`max_pending`: changes that are kept for `take_deltas`; past them the watcher is made to see a gap."""
        self._by_digest: dict[bytes, _Node] = {}  # in the order of publishing
        self._by_block: dict[int, _Node] = {}
        self._num_evictable = 0
        self._heap: list[tuple[int, int, int]] = []  # (last_used, order, block id); may be stale, see `evict`
        self._num_published = 0
        self._now = 0
        self._news = _News(max_pending)

    # ---- queries

    @property
    def num_cached(self) -> int:
        """Blocks in the index, held or not."""
        return len(self._by_block)

    @property
    def num_evictable(self) -> int:
        """Blocks that only the cache holds; that many calls of `evict` succeed. Kept, never scanned."""
        return self._num_evictable

    def holds(self, block_id: int) -> bool:
        """Is this block cached, held by requests or not?"""
        return block_id in self._by_block

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Block ids of the longest cached chain from the first digest on. Changes nothing: pin them before anything is
        evicted."""
        block_ids: list[int] = []
        for digest in digests:
            node = self._by_digest.get(digest)
            if node is None:
                break
            block_ids.append(node.block_id)
        return block_ids

    # ---- changes

    def publish(self, digest: bytes, parent: bytes | None, block_id: int) -> bool:
        """Cache a block that is whole, written and held now; `parent` is the digest before it, None for a first block.

        False if another block has this digest: the caller's copy stays private, and so does what follows it. True again
        for what is published just so already. Raises InvariantBroken if the block has another digest, the parent is
        unknown, is another one than before, or has no holder, or if nobody holds the block.
        """
        above = None if parent is None else self._by_digest.get(parent)
        if parent is not None and above is None:
            raise InvariantBroken(f"block {block_id} would hang on {parent.hex()}, which is not cached")
        known, same = self._by_block.get(block_id), self._by_digest.get(digest)
        if known is not None and known is not same:
            raise InvariantBroken(f"block {block_id} is cached as {known.digest.hex()}, not {digest.hex()}")
        if same is not None and same.parent is not above:
            raise InvariantBroken(f"{digest.hex()} is cached under another parent")
        if known is not None and not known.is_held:
            raise InvariantBroken(f"block {block_id} is published again and nobody holds it")
        if same is not None:
            return known is same
        if above is not None:
            if not above.is_held:
                raise InvariantBroken(f"block {block_id} would hang on block {above.block_id}, which nobody holds")
            above.num_children += 1
        self._num_published += 1
        node = _Node(digest, above, block_id, order=self._num_published)
        self._by_digest[digest] = self._by_block[block_id] = node
        self._news.published(digest)
        return True

    def pin(self, block_id: int) -> None:
        """A cached block got its first holder. Raises InvariantBroken if it is not cached or has one already."""
        node = self._node(block_id)
        if node.is_held:
            raise InvariantBroken(f"block {block_id} got a first holder and has one")
        node.is_held = True
        self._num_evictable -= 1

    def unpin(self, block_id: int, now: int) -> None:
        """A cached block lost its last holder, at logical time `now` that never goes back; it is cache-only from here.

        The blocks of one chain may come in any order, but all of them before the next call of `evict`.
        """
        node = self._node(block_id)
        if not node.is_held:
            raise InvariantBroken(f"block {block_id} lost its last holder and had none")
        if now < self._now:
            raise InvariantBroken(f"time goes back from {self._now} to {now}")
        self._now = node.last_used = now
        node.is_held = False
        self._num_evictable += 1
        if node.can_go:
            self._offer(node)

    def evict(self) -> int:
        """Forget the block that was used least recently among cache-only blocks without a cached child, and say which;
        of several of the same time the one published first. Raises InvariantBroken if there is none."""
        while self._heap:
            last_used, order, block_id = heappop(self._heap)
            node = self._by_block.get(block_id)
            if node is not None and node.can_go and (node.last_used, node.order) == (last_used, order):
                self._forget(node)
                return block_id
        raise InvariantBroken(f"none of {self._num_evictable} cache-only blocks is a leaf; {self.num_cached} cached")

    # ---- news

    def take_deltas(self) -> PrefixDelta | None:
        """What changed since the last call; None if nothing did. After changes were dropped the number jumps."""
        return self._news.take()

    def snapshot(self) -> tuple[int, tuple[bytes, ...]]:
        """State `number`, parents first: the next delta continues from exactly there. Changes nothing."""
        return self._news.number, self._news.state_before(self._by_digest)

    # ---- audit

    def audit(self) -> None:
        """Recount everything from the nodes, O(blocks); raises AuditFailed that names what differs."""
        nodes = self._by_digest
        if len(nodes) != len(self._by_block):
            raise AuditFailed(f"{len(nodes)} digests are cached for {len(self._by_block)} blocks")
        children: dict[_Node, int] = {}
        entries = set(self._heap)
        for digest, node in nodes.items():
            if node.digest != digest or self._by_block.get(node.block_id) is not node:
                raise AuditFailed(f"block {node.block_id} and digest {digest.hex()} do not know each other")
            if node.can_go and (node.last_used, node.order, node.block_id) not in entries:
                raise AuditFailed(f"block {node.block_id} is a cache-only leaf that eviction would not find")
            above = node.parent
            if above is None:
                continue
            if nodes.get(above.digest) is not above:
                raise AuditFailed(f"block {node.block_id} hangs on block {above.block_id}, which is not cached")
            if node.is_held and not above.is_held:
                raise AuditFailed(f"block {node.block_id} is held, and block {above.block_id} before it is not")
            children[above] = children.get(above, 0) + 1
        for node in nodes.values():
            if node.num_children != children.get(node, 0):
                raise AuditFailed(
                    f"block {node.block_id}: {node.num_children} children counted, {children.get(node, 0)} are"
                )
        evictable = sum(not node.is_held for node in nodes.values())
        if evictable != self._num_evictable:
            raise AuditFailed(f"{self._num_evictable} blocks counted as evictable, {evictable} are")

    # ---- inside

    def _node(self, block_id: int) -> _Node:
        node = self._by_block.get(block_id)
        if node is None:
            raise InvariantBroken(f"block {block_id} is not cached")
        return node

    def _forget(self, node: _Node) -> None:
        del self._by_digest[node.digest]
        del self._by_block[node.block_id]
        self._num_evictable -= 1
        self._news.evicted(node.digest)
        above = node.parent
        if above is not None:
            above.num_children -= 1
            if above.can_go:
                self._offer(above)

    def _offer(self, node: _Node) -> None:
        """Let eviction find a node that can go now. Entries are not taken out when that changes; once most are stale
        the heap is built anew, so it stays as small as the index at a constant cost per call."""
        if len(self._heap) < 2 * len(self._by_block) + _STALE_ALLOWED:
            heappush(self._heap, (node.last_used, node.order, node.block_id))
            return
        self._heap = [(one.last_used, one.order, one.block_id) for one in self._by_block.values() if one.can_go]
        heapify(self._heap)


class _News:
    """Net changes since state `number`. Invariant: `_published` is cached now and was not then, `_evicted` the other
    way round; so they share no digest, and a digest that came and went, or went and came, is in neither."""

    def __init__(self, max_pending: int) -> None:
        self.number = 0
        self._max_pending = max_pending
        self._published: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}
        self._has_gap = False  # a state was numbered and its delta dropped; the next delta shows it

    def published(self, digest: bytes) -> None:
        if digest in self._evicted:
            del self._evicted[digest]
        else:
            self._published[digest] = None
            self._maybe_drop()

    def evicted(self, digest: bytes) -> None:
        if digest in self._published:
            del self._published[digest]
        else:
            self._evicted[digest] = None
            self._maybe_drop()

    def take(self) -> PrefixDelta | None:
        if not (self._published or self._evicted or self._has_gap):
            return None
        published, evicted = tuple(self._published), tuple(self._evicted)
        self._close()
        self._has_gap = False
        return PrefixDelta(self.number, published, evicted)

    def state_before(self, cached: dict[bytes, _Node]) -> tuple[bytes, ...]:
        """What was cached in state `number`, given what is cached now. Evicted ones went leaves first."""
        kept = [digest for digest in cached if digest not in self._published]
        return (*kept, *reversed(self._evicted))

    def _maybe_drop(self) -> None:
        if len(self._published) + len(self._evicted) > self._max_pending:
            self._close()
            self._has_gap = True

    def _close(self) -> None:
        self.number += 1
        self._published.clear()
        self._evicted.clear()
