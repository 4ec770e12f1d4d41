"""A constant load on a cluster: streams one after the other, from several clients at once, each answer compared."""

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from loopline.client import Client, Completion
from loopline.errors import LooplineError
from tests.support.cluster import Cluster, wait_until

Case = tuple[tuple[int, ...], int]  # prompt, max_tokens
LOOPS = 1
"""Of every answer: what is computed costs little beside the processes that come and go."""
DEADLINE_S = 400.0
_END_S = 90.0


def ask(client: Client, case: Case) -> Completion:
    prompt, max_tokens = case
    return client.complete(prompt, deadline_s=DEADLINE_S, max_tokens=max_tokens, ignore_eos=True, loops=LOOPS)


class ConstantLoad:
    """Inside its `with` block clients ask without a pause; the block's end waits for their last answers and raises
    AssertionError for one that failed or differs."""

    def __init__(
        self,
        cluster: Cluster,
        cases: Sequence[Case],
        expected: Sequence[tuple[int, ...]],
        clients: int,
        end_s: float = _END_S,
    ) -> None:
        """`end_s`: the longest that an answer may take."""
        self._end_s = end_s
        self._address = cluster.address
        self._cases, self._expected = cases, expected
        self._stopping = threading.Event()
        self._faults: list[str] = []
        self._answers = 0
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(first,), daemon=True) for first in range(clients)]

    @property
    def answers(self) -> int:
        """Whole answers so far."""
        return self._answers

    def wait_answers(self, more: int) -> None:
        """Until so many more answers are whole, or one has gone wrong."""
        enough = self._answers + more
        wait_until(lambda: self._answers >= enough or self._faults, f"{more} more answers", self._end_s)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(self._end_s)
        if error is None:
            assert not any(thread.is_alive() for thread in self._threads), "an answer does not end"
        assert not self._faults, self._faults

    def _ask(self, index: int) -> None:
        with Client(self._address) as client:
            while not self._stopping.is_set():
                number = index % len(self._cases)
                fault = ""
                try:
                    answer = ask(client, self._cases[number])
                except LooplineError as error:
                    fault = f"case {number}: {error!r}"
                else:
                    if answer.token_ids != self._expected[number]:
                        fault = f"case {number}: {answer.token_ids}, and not {self._expected[number]}"
                with self._lock:
                    self._answers += 1
                    self._faults += [fault] if fault else []
                index += 1
