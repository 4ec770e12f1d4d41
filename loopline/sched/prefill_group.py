"""The requests whose known tokens are being computed, chunk by chunk: what of each a step takes, within its budget.

Private to `loopline.sched`. The sibling of `decode_group`: an entry is here from its admission until the token after
its known ones is there, or until it leaves.
"""

from collections.abc import Mapping, Sequence

from loopline.errors import InvariantBroken
from loopline.kv.ledger import Ledger
from loopline.sched.budget import PromptLimit, StepBudget, chunk_end
from loopline.sched.entry import Entry
from loopline.sched.plan import RowRun, Sampling
from loopline.sched.policy import HoldsBack, RolePolicy
from loopline.sched.share import PromptShare
from loopline.settings import SchedulerSettings


class PrefillGroup:
    """Invariant: num_computed <= num_planned <= known tokens, of every entry. One that is planned to its end waits for
    the commit of its last chunk: the token which that gives is known on the host before it is computed."""

    def __init__(self, ledger: Ledger, settings: SchedulerSettings, share: PromptShare, policy: RolePolicy) -> None:
        self._ledger = ledger
        self._settings = settings
        self._share = share
        self._holds_back = policy if isinstance(policy, HoldsBack) else None
        self._entries: dict[str, Entry] = {}  # in order of admission

    def add(self, entry: Entry) -> None:
        """An entry was let in."""
        self._entries[entry.request.request_id] = entry

    def discard(self, entry: Entry) -> None:
        """An entry has nothing to compute here any more."""
        self._entries.pop(entry.request.request_id, None)

    def next_runs(self, decode: Mapping[int, int]) -> list[RowRun]:
        """Chunks for the next step, whose numbers of decode rows stand in `decode` by depth."""
        entries = [entry for entry in self._entries.values() if entry.num_planned < len(entry.token_ids)]
        if self._holds_back is not None:
            entries = [entry for entry in entries if self._holds_back.may_compute(entry.request.request_id)]
        if not entries:
            return []
        budget = self._budget(decode, entries[0].depth)
        runs: list[RowRun] = []
        num_rows = most_rows = 0
        for entry in entries:
            most = max(most_rows, self._alone(entry.depth))
            run = self._next_run(entry, budget, most - num_rows, must_progress=not decode and not runs)
            if run is not None:
                runs.append(run)
                num_rows, most_rows = num_rows + run.num_tokens, most
        return runs

    def begin(self, runs: Sequence[RowRun], step: int) -> None:
        """`step` computes these chunks."""
        for run in runs:
            self._ledger.begin_run(
                run.allocation, run.first_position, run.num_tokens, run.params.loops, step, run.writes
            )
            self._entries[run.request_id].num_planned += run.num_tokens

    def commit(self, entry: Entry, run: RowRun) -> None:
        """A chunk of this entry was computed."""
        if run.writes:
            self._ledger.mark_written(run.allocation, run.first_position, run.num_tokens, entry.depth)
        entry.num_computed += run.num_tokens

    def _budget(self, decode: Mapping[int, int], first_depth: int) -> StepBudget:
        """Of a step with these decode rows, whose first prompt has that depth. Without decode rows nobody waits for
        the step, and its prompts need not share it."""
        if not decode:
            return StepBudget(self._settings.max_token_loops)
        most = self._share.token_loops(decode, first_depth)
        limit = None if most is None else PromptLimit(most, self._share.rows)
        budget = StepBudget(self._settings.max_token_loops, self._settings.prefill_tokens_per_loop, limit)
        budget.charge_decode(sum(rows * depth for depth, rows in decode.items()), self._least(first_depth))
        return budget

    def _least(self, depth: int) -> int:
        """Token-loops of prompts in any step: a pass of the fewest rows, whatever decodes beside it. Prompts of another
        depth may get what the first one leaves of it."""
        return min(self._share.rows.padded(1), self._alone(depth)) * depth

    def _alone(self, depth: int) -> int:
        """Most rows of a step of prompts of this depth alone. No other step has more rows of prompts, since that is
        what the engine has memory for."""
        return max(self._settings.max_token_loops // depth, self._ledger.block_size)

    def _next_run(self, entry: Entry, budget: StepBudget, most_rows: int, *, must_progress: bool) -> RowRun | None:
        block_size, first, total = self._ledger.block_size, entry.num_planned, len(entry.token_ids)
        most = max(0, min(self._settings.chunk_tokens, budget.tokens_left(entry.depth), most_rows))
        if not most:
            if not must_progress:
                return None
            most = block_size
        end = chunk_end(first, total, most, block_size)
        budget.charge_prompt(end - first, entry.depth)
        if entry.allocation is None:
            raise InvariantBroken(f"request {entry.request.request_id} runs without blocks")
        return RowRun(
            request_id=entry.request.request_id,
            allocation=entry.allocation,
            params=entry.request.params,
            first_position=first,
            token_ids=tuple(entry.token_ids[first:end]),
            sampling=Sampling(end, entry.num_generated, entry.history()) if end == total else None,
            writes=entry.num_cached < total,
        )
