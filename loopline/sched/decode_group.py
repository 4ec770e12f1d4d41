"""The decoding requests of one depth, as columns: what changes from step to step changes for all rows at once.

Private to `loopline.sched`. Rows stand in the order of admission. Python work per step is a handful of array operations
and one append per row; more only for rows that end, or whose block is full.

Shape letters: D rows, P stop ids of the request that has most.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from loopline.errors import InvariantBroken
from loopline.kv.ledger import Allocation, Ledger
from loopline.request import FinishReason, TokenLogprobs
from loopline.sched.entry import Entry
from loopline.sched.plan import NOT_FINITE, DecodeRows, TokenColumns

_NO_STOP_ID = -2  # no token has it, nor is it NOT_FINITE


class DecodeGroup:
    """Invariant: after `refresh`, row i of every column is entries[i]."""

    def __init__(self, depth: int, ledger: Ledger) -> None:
        self.depth = depth
        self._ledger = ledger
        self._entries: dict[str, Entry] = {}
        self._is_stale = True
        self._order: list[Entry] = []
        self._token_lists: list[list[int]] = []
        self._rows: DecodeRows | None = None
        self._most = self._stop = np.zeros(0, np.int64)
        self._has_histories = False

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry) -> None:
        """An entry starts to decode: its last known token is the next to be computed."""
        self._entries[entry.request.request_id] = entry
        self._is_stale = True

    def discard(self, entry: Entry) -> None:
        """An entry decodes no more."""
        if self._entries.pop(entry.request.request_id, None) is not None:
            self._is_stale = True

    def plan(self) -> DecodeRows:
        """The rows of the next step; there is at least one, and each has a block for its position."""
        if self._is_stale or self._rows is None:
            self._rebuild()
        if self._rows is None:
            raise InvariantBroken(f"no row decodes at depth {self.depth}")
        rows = self._rows
        if self._has_histories:
            histories = tuple(entry.history() for entry in self._order)
            rows = DecodeRows(
                rows.requests,
                rows.allocations,
                rows.book_rows,
                rows.positions,
                rows.token_ids,
                rows.num_generated,
                histories,
            )
        return rows

    def without_room(self) -> list[Entry]:
        """Entries whose next position has no block yet, oldest first."""
        rows = self.plan()
        return [self._order[index] for index in self._ledger.short_rows(rows.book_rows, rows.positions + 1).tolist()]

    def commit(
        self, planned: DecodeRows, token_ids: Sequence[int], logprobs: Mapping[int, TokenLogprobs]
    ) -> tuple[TokenColumns, list[Entry], list[Entry]]:
        """Take the tokens of the rows that were planned: the new tokens, and the entries that ended and that failed.

        Rows whose entry left the group meanwhile are passed over.
        """
        if self._is_stale or self._rows is None or planned.requests is not self._rows.requests:
            planned, token_ids, logprobs = self._still_here(planned, token_ids, logprobs)
            if not len(planned):
                return TokenColumns(self.depth, (), (), (), {}, {}), [], []
        tokens = np.asarray(token_ids, np.int64)
        self._ledger.mark_rows(planned.book_rows, planned.positions, self.depth)
        if self._rows is None:
            raise InvariantBroken("rows were planned of a group without rows")
        generated = self._rows.num_generated + 1
        is_stop = (self._stop == tokens[:, None]).any(axis=1)
        failed = tokens == NOT_FINITE
        ended = (is_stop | (generated >= self._most)) & ~failed
        for token_list, token_id in zip(self._token_lists, token_ids, strict=True):
            token_list.append(token_id)
        self._rows = DecodeRows(
            planned.requests, planned.allocations, planned.book_rows, planned.positions + 1, tokens, generated
        )
        return self._columns(planned, token_ids, logprobs, is_stop, ended, failed)

    def whole_blocks(self, block_size: int) -> list[Entry]:
        """Entries whose last written position filled a block; to be asked right after `commit`."""
        if self._is_stale or self._rows is None:
            return [entry for entry in self._entries.values() if entry.num_written % block_size == 0]
        return [self._order[index] for index in np.flatnonzero(self._rows.positions % block_size == 0).tolist()]

    def _columns(
        self,
        planned: DecodeRows,
        token_ids: Sequence[int],
        logprobs: Mapping[int, TokenLogprobs],
        is_stop: "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]",
        ended: "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]",
        failed: "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]",
    ) -> tuple[TokenColumns, list[Entry], list[Entry]]:
        finish, done, lost = {}, [], []
        for index in np.flatnonzero(ended | failed).tolist():
            entry = self._order[index]
            if failed[index] or is_stop[index]:
                entry.token_ids.pop()
            if failed[index]:
                lost.append(entry)
                continue
            finish[index] = FinishReason.STOP if is_stop[index] else FinishReason.LENGTH
            done.append(entry)
        kept = [index for index in range(len(planned)) if not failed[index]] if lost else None
        columns = TokenColumns(
            self.depth, planned.requests, (planned.positions + 1).tolist(), token_ids, finish, logprobs
        )
        if kept is not None:
            columns = _select(columns, kept)
        for entry in (*done, *lost):
            self.discard(entry)
        return columns, done, lost

    def _still_here(
        self, planned: DecodeRows, token_ids: Sequence[int], logprobs: Mapping[int, TokenLogprobs]
    ) -> tuple[DecodeRows, Sequence[int], Mapping[int, TokenLogprobs]]:
        """Rebuild the columns, and keep of a step what is about their rows."""
        kept = [
            index
            for index, (request, allocation) in enumerate(zip(planned.requests, planned.allocations, strict=True))
            if (entry := self._entries.get(request.request_id)) is not None and entry.allocation is allocation
        ]
        names = {planned.requests[index].request_id for index in kept}
        newer = [entry for name, entry in self._entries.items() if name not in names]
        for entry in newer:
            del self._entries[entry.request.request_id]
        self._rebuild()
        for entry in newer:
            self.add(entry)
        position_of = {index: place for place, index in enumerate(kept)}
        return (
            self._rows or _NO_ROWS,
            [token_ids[index] for index in kept],
            {position_of[index]: value for index, value in logprobs.items() if index in position_of},
        )

    def _rebuild(self) -> None:
        self._order = list(self._entries.values())
        self._token_lists = [entry.token_ids for entry in self._order]
        self._has_histories = any(entry.wants_history for entry in self._order)
        most_stops = max((len(entry.request.params.stop_ids) for entry in self._order), default=0)
        self._most = np.array([entry.request.params.max_tokens for entry in self._order], np.int64)
        self._stop = np.full((len(self._order), max(1, most_stops)), _NO_STOP_ID, np.int64)
        for index, entry in enumerate(self._order):
            self._stop[index, : len(entry.request.params.stop_ids)] = entry.request.params.stop_ids
        allocations = tuple(_allocation(entry) for entry in self._order)
        self._rows = DecodeRows(
            requests=tuple(entry.request for entry in self._order),
            allocations=allocations,
            book_rows=np.array([self._ledger.row_of(one) for one in allocations], np.int64),
            positions=np.array([len(entry.token_ids) - 1 for entry in self._order], np.int64),
            token_ids=np.array([entry.token_ids[-1] for entry in self._order], np.int64),
            num_generated=np.array([entry.num_generated for entry in self._order], np.int64),
        )
        self._is_stale = False


def _select(columns: TokenColumns, kept: list[int]) -> TokenColumns:
    place = {index: new for new, index in enumerate(kept)}
    return TokenColumns(
        columns.depth,
        [columns.requests[index] for index in kept],
        [columns.positions[index] for index in kept],
        [columns.token_ids[index] for index in kept],
        {place[index]: value for index, value in columns.finish.items()},
        {place[index]: value for index, value in columns.logprobs.items() if index in place},
    )


def _allocation(entry: Entry) -> Allocation:
    if entry.allocation is None:
        raise InvariantBroken(f"request {entry.request.request_id} decodes without blocks")
    return entry.allocation


_EMPTY = np.zeros(0, np.int64)
_NO_ROWS = DecodeRows((), (), _EMPTY, _EMPTY, _EMPTY, _EMPTY)
