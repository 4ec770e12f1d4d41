"""What is known of the workers' prefix caches, from their numbered reports, and how much of a request is in them. Pure.

All of it is a hint: digests are cut, reports are under way while blocks are evicted, and the answer of the worker is
the truth. So a gap costs nothing but a worse choice until the worker has said all of it again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from loopline.identity import Fingerprint, WorkerId
from loopline.kv.digests import BlockDigests, request_root
from loopline.messages import CUT_DIGEST_BYTES, PrefixReport
from loopline.request import Request

_ASK_AGAIN_S = 5.0  # an answer that has not come by then was lost


@dataclass(eq=False, slots=True)
class _Known:
    """Of one worker. `number` None: not known, and asked for."""

    most: int
    asked_at_s: float
    number: int | None = None
    digests: set[bytes] = field(default_factory=set)
    incoming: set[bytes] = field(default_factory=set)  # of a whole that has not come to its end
    under_way: tuple[int, bool, int] | None = None  # (number, is_whole, next part)


class PrefixTable:
    """Invariant: of each worker no more digests are kept than it has blocks."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, _Known] = {}

    def joined(self, worker: WorkerId, num_blocks: int, now_s: float) -> None:
        """Expect a whole report of it: the caller asks for one."""
        self._workers[worker] = _Known(num_blocks, now_s)

    def lost(self, worker: WorkerId) -> None:
        self._workers.pop(worker, None)

    def num_known(self, worker: WorkerId) -> int:
        """Blocks that it is known to have cached."""
        known = self._workers.get(worker)
        return 0 if known is None else len(known.digests)

    def take(self, worker: WorkerId, report: PrefixReport, now_s: float) -> bool:
        """Take a report; whether a whole one must be asked for, because what it builds on is not known."""
        known = self._workers.get(worker)
        if known is None:
            return False
        if self._follows(known, report):
            self._apply(known, report)
            return False
        known.under_way = None
        was_known, known.number = known.number is not None, None
        if was_known or now_s >= known.asked_at_s + _ASK_AGAIN_S:
            known.asked_at_s = now_s
            return True
        return False

    def num_cached(self, worker: WorkerId, digests: Sequence[bytes]) -> int:
        """Leading blocks of a chain that the worker has: it has every block before one that it has."""
        known = self._workers.get(worker)
        if known is None or not digests or digests[0] not in known.digests:
            return 0
        low, high = 1, len(digests)
        while low < high:
            middle = (low + high + 1) // 2
            if digests[middle - 1] in known.digests:
                low = middle
            else:
                high = middle - 1
        return low

    def _follows(self, known: _Known, report: PrefixReport) -> bool:
        """Is it the next part of what is under way, or the first of what may come now?"""
        sizes = len(report.published), len(report.evicted)
        if any(size % CUT_DIGEST_BYTES for size in sizes) or not 0 <= report.part < report.num_parts:
            return False
        if report.part:
            return known.under_way == (report.number, report.is_whole, report.part)
        return report.is_whole or (known.number is not None and report.number == known.number + 1)

    def _apply(self, known: _Known, report: PrefixReport) -> None:
        if report.is_whole and not report.part:
            known.incoming = set()
        digests = known.incoming if report.is_whole else known.digests
        digests.difference_update(_split(report.evicted))
        for digest in _split(report.published):
            if len(digests) < known.most:
                digests.add(digest)
        if report.part + 1 < report.num_parts:
            known.under_way = report.number, report.is_whole, report.part + 1
            return
        known.number, known.under_way = report.number, None
        if report.is_whole:
            known.digests, known.incoming = digests, set()


def _split(data: bytes) -> Iterator[bytes]:
    return (data[first : first + CUT_DIGEST_BYTES] for first in range(0, len(data), CUT_DIGEST_BYTES))


class RequestPrefixes:
    """Digests of requests that wait for a worker: each block is hashed once, however often a request is tried."""

    def __init__(self) -> None:
        self._chains: dict[str, dict[Fingerprint, _Chain]] = {}

    def __len__(self) -> int:
        return len(self._chains)

    def digests(self, request: Request, group: Fingerprint, block_size: int) -> Sequence[bytes]:
        """Cut digests of the whole blocks of its known tokens, in order, as workers of this group name them; none where
        they do not share its KV."""
        chains = self._chains.setdefault(request.request_id, {})
        chain = chains.get(group)
        if chain is None:
            root = request_root(group, request.params)
            chain = chains[group] = _Chain(None if root is None else BlockDigests(root, block_size))
        if chain.blocks is not None and len(chain.cut) < request.num_known_tokens // block_size:
            chain.blocks.extend((*request.prompt_ids, *request.generated_ids))
            chain.cut += [digest[:CUT_DIGEST_BYTES] for digest in chain.blocks.digests[len(chain.cut) :]]
        return chain.cut

    def ended(self, request_id: str) -> None:
        self._chains.pop(request_id, None)


@dataclass(eq=False, slots=True)
class _Chain:
    blocks: BlockDigests | None  # None: nothing of the request is shared
    cut: list[bytes] = field(default_factory=list)
