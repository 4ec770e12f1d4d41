"""The decoding requests of one depth, as columns: what changes from step to step changes for all rows at once.

Private to `loopline.sched`. Rows stand in the order of admission. Python work per step is a handful of array operations
and one append per row; more only for rows that end or join, or whose block is full.

**Ahead of the device.** While steps are in flight the tokens that they choose are not known here. A row that such a
step computes goes on one position further, and its token is named by where the step before chooses it. A row that
those steps end for certain has no row more. One that ends otherwise, by a stop id, has been planned in vain: its later
rows find no entry when they are committed, and are passed over.

Shape letters: D rows, P stop ids of the request that has most.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from loopline.errors import InvariantBroken
from loopline.kv.block_books import IntArray
from loopline.kv.ledger import Allocation, Ledger
from loopline.request import FinishReason, TokenExtras
from loopline.sched.entry import Entry
from loopline.sched.plan import KNOWN, NOT_FINITE, DecodeRows, StepPlan, TokenColumns

BoolArray = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
_NO_STOP_ID = -2  # no token has it, nor is it NOT_FINITE
_EMPTY = np.zeros(0, np.int64)
_NO_ROWS = DecodeRows((), (), _EMPTY, _EMPTY, _EMPTY, _EMPTY)


class DecodeGroup:
    """Invariants: unless stale, row i of every column is _order[i]; `_rows` are what each computes next as far as
    tokens are known, and the steps in flight compute `_ahead` [D] positions of each from there on.

    An entry is known by its allocation: a request that left and came again under its id has another.
    """

    def __init__(self, depth: int, ledger: Ledger) -> None:
        self.depth = depth
        self._ledger = ledger
        self._entries: dict[Allocation, Entry] = {}
        self._is_stale = False
        self._order: list[Entry] = []
        self._token_lists: list[list[int]] = []
        self._rows = self._latest = _NO_ROWS  # `_latest`: the rows of the last step that was begun
        self._ahead = self._most = _EMPTY  # [D]
        self._stop = np.zeros((0, 1), np.int64)  # [D, P]
        self._has_histories = False

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry) -> None:
        """An entry starts to decode: its last known token is the next to be computed."""
        self._entries[_allocation(entry)] = entry
        self._is_stale = True

    def discard(self, entry: Entry) -> None:
        """An entry decodes no more."""
        if self._entries.pop(_allocation(entry), None) is not None:
            self._is_stale = True

    # ---- plan

    def waits_for_tokens(self) -> bool:
        """Whether nothing can be planned before a commit: penalties look at tokens that are still being chosen."""
        self._refresh()
        return self._has_histories and bool(self._ahead.any())

    def next_rows(self, previous: StepPlan | None) -> DecodeRows:
        """The rows of the next step, possibly none; `previous` is the step before it, None if that is committed."""
        self._refresh()
        if previous is not None and self._ahead.any():
            return self._rows_ahead(previous)
        if not self._has_histories:
            return self._rows
        return replace(self._rows, histories=tuple(entry.history() for entry in self._order))

    def without_room(self, rows: DecodeRows) -> list[tuple[Entry, int]]:
        """Of the next rows, entries whose position has no block yet, oldest first; with the tokens to have room for."""
        num_tokens = rows.positions + 1
        short = self._ledger.short_rows(rows.book_rows, num_tokens).tolist()
        return [(self._entries[rows.allocations[index]], int(num_tokens[index])) for index in short]

    def begin(self, rows: DecodeRows, step: int) -> None:
        """`step` computes the next rows, each of which has a block for its position."""
        self._ledger.begin_rows(rows.book_rows, rows.positions, self.depth, step)
        self._ahead = self._ahead + self._goes_on()
        self._latest = rows

    def _goes_on(self) -> BoolArray:
        """Rows [D] that the steps in flight leave short of their most tokens."""
        return self._rows.num_generated + self._ahead < self._most

    def _rows_ahead(self, previous: StepPlan) -> DecodeRows:
        rows, ahead, goes_on = self._rows, self._ahead, self._goes_on()
        is_known = ahead == 0
        sources = np.where(is_known, KNOWN, self._places(previous, goes_on & ~is_known))
        planned = DecodeRows(
            requests=rows.requests,
            allocations=rows.allocations,
            book_rows=rows.book_rows,
            positions=rows.positions + ahead,
            token_ids=np.where(is_known, rows.token_ids, 0),
            num_generated=rows.num_generated + ahead,
            sources=sources,
        )
        return planned if goes_on.all() else planned.take(np.flatnonzero(goes_on).tolist())

    def _places(self, previous: StepPlan, needed: BoolArray) -> IntArray:
        """Where each row's [D] token stands among those that the step before chooses; of those `needed`, at least."""
        start, before = previous.decode_at(self.depth) or (0, _NO_ROWS)
        if before.requests is self._rows.requests:
            return np.arange(start, start + len(before))
        place_of = {allocation: start + place for place, allocation in enumerate(before.allocations)}
        places = np.array([place_of.get(one, -1) for one in self._rows.allocations], np.int64)
        if (places[needed] < 0).any():
            raise InvariantBroken(f"a row goes on from a token that step {previous.step} does not choose")
        return places

    # ---- commit

    def commit(
        self, planned: DecodeRows, token_ids: Sequence[int], extras: Mapping[int, TokenExtras]
    ) -> tuple[TokenColumns, list[Entry], list[Entry]]:
        """Take the tokens of the rows that were planned: the new tokens, and the entries that ended and that failed.

        Steps are committed in order. Rows whose entry left the group meanwhile are passed over.
        """
        self._refresh()
        where: slice | list[int] = slice(None)
        entries, token_lists = self._order, self._token_lists
        if planned.requests is not self._rows.requests:
            planned, token_ids, extras, where = self._still_here(planned, token_ids, extras)
            entries, token_lists = [entries[i] for i in where], [token_lists[i] for i in where]
        tokens = np.asarray(token_ids, np.int64)
        self._ledger.mark_rows(planned.book_rows, planned.positions, self.depth)
        self._advance(where, tokens)
        is_stop = (self._stop[where] == tokens[:, None]).any(axis=1)
        failed = tokens == NOT_FINITE
        ended = (is_stop | (planned.num_generated + 1 >= self._most[where])) & ~failed
        for token_list, token_id in zip(token_lists, token_ids, strict=True):
            token_list.append(token_id)
        finish, done, lost = self._end(entries, is_stop, ended, failed)
        positions = (planned.positions + 1).tolist()
        columns = TokenColumns(self.depth, planned.requests, positions, token_ids, finish, extras)
        return _select(columns, np.flatnonzero(~failed).tolist()) if lost else columns, done, lost

    def whole_blocks(self, block_size: int) -> list[Entry]:
        """Entries whose last written position filled a block; to be asked right after `commit`."""
        whole = [self._order[index] for index in np.flatnonzero(self._rows.positions % block_size == 0).tolist()]
        return [entry for entry in whole if entry.allocation in self._entries]

    def _advance(self, where: slice | list[int], tokens: IntArray) -> None:
        """The rows at `where` have computed their position, which gave `tokens`."""
        rows = self._rows
        moved = np.zeros(len(rows), np.int64)
        moved[where] = 1
        token_ids = rows.token_ids.copy()
        token_ids[where] = tokens
        self._ahead = self._ahead - moved
        self._rows = DecodeRows(
            requests=rows.requests,
            allocations=rows.allocations,
            book_rows=rows.book_rows,
            positions=rows.positions + moved,
            token_ids=token_ids,
            num_generated=rows.num_generated + moved,
        )

    def _end(
        self, entries: list[Entry], is_stop: BoolArray, ended: BoolArray, failed: BoolArray
    ) -> tuple[dict[int, FinishReason], list[Entry], list[Entry]]:
        """Take out what ended, with the reasons by index, and what failed."""
        finish, done, lost = {}, [], []
        for index in np.flatnonzero(ended | failed).tolist():
            entry = entries[index]
            self.discard(entry)
            if failed[index] or is_stop[index]:
                entry.token_ids.pop()
            if failed[index]:
                lost.append(entry)
                continue
            finish[index] = FinishReason.STOP if is_stop[index] else FinishReason.LENGTH
            done.append(entry)
        return finish, done, lost

    def _still_here(
        self, planned: DecodeRows, token_ids: Sequence[int], extras: Mapping[int, TokenExtras]
    ) -> tuple[DecodeRows, Sequence[int], Mapping[int, TokenExtras], list[int]]:
        """Keep of a step what is about rows of the group, and say which rows those are."""
        row_of = {allocation: row for row, allocation in enumerate(self._rows.allocations)}
        kept = [index for index, allocation in enumerate(planned.allocations) if allocation in row_of]
        place_of = {index: place for place, index in enumerate(kept)}
        return (
            planned.take(kept),
            [token_ids[index] for index in kept],
            {place_of[index]: value for index, value in extras.items() if index in place_of},
            [row_of[planned.allocations[index]] for index in kept],
        )

    # ---- columns

    def _refresh(self) -> None:
        """Make the columns anew if an entry came or left."""
        if not self._is_stale:
            return
        ahead = dict(zip(self._rows.allocations, self._ahead.tolist(), strict=True))
        self._order = list(self._entries.values())
        self._token_lists = [entry.token_ids for entry in self._order]
        self._has_histories = any(entry.wants_history for entry in self._order)
        most_stops = max((len(entry.request.params.stop_ids) for entry in self._order), default=0)
        self._most = np.array([entry.request.params.max_tokens for entry in self._order], np.int64)
        self._stop = np.full((len(self._order), max(1, most_stops)), _NO_STOP_ID, np.int64)
        for index, entry in enumerate(self._order):
            self._stop[index, : len(entry.request.params.stop_ids)] = entry.request.params.stop_ids
        allocations = tuple(self._entries)
        self._ahead = np.array([ahead.get(one, 0) for one in allocations], np.int64)
        if allocations == self._latest.allocations:  # the last plan foresaw it: keep the objects
            requests, allocations = self._latest.requests, self._latest.allocations
        else:
            requests = tuple(entry.request for entry in self._order)
        self._rows = DecodeRows(
            requests=requests,
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
        {place[index]: value for index, value in columns.extras.items() if index in place},
    )


def _allocation(entry: Entry) -> Allocation:
    if entry.allocation is None:
        raise InvariantBroken(f"request {entry.request.request_id} decodes without blocks")
    return entry.allocation
