"""Clients that ask again and again, and turn to another kind of request when they are told to."""

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import Self

from loopline.client import Chunk
from tests.support.cluster import Cluster
from tests.support.soak import Case

DEADLINE_S = 300.0


@dataclass
class Figures:
    """What came while one kind of request was asked for. A prompt counts when its first token is there."""

    name: str
    began_s: float
    ended_s: float = 0.0
    requests: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0

    def __str__(self) -> str:
        seconds = self.ended_s - self.began_s
        return (
            f"{self.name}, {seconds:.0f} s: {self.requests / seconds:.2f} requests/s,"
            f" {self.prompt_tokens / seconds:.0f} prompt tokens/s, {self.answer_tokens / seconds:.0f} answer tokens/s"
        )


class TurningLoad:
    """So many clients between enter and exit; exit waits for the last answers and raises what a client met."""

    def __init__(self, cluster: Cluster, num_clients: int) -> None:
        self._cluster = cluster
        self._pool = ThreadPoolExecutor(num_clients)
        self._num_clients = num_clients
        self._clients: list[Future[None]] = []
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._cases: Sequence[Case] = ()
        self._stopped = threading.Event()
        self.phases: list[Figures] = []
        self.wrong: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._end_phase()
        self._pool.shutdown()
        for client in self._clients:
            client.result()

    @property
    def requests(self) -> int:
        """Whole answers since the last turn."""
        return self.phases[-1].requests

    def turn(self, name: str, cases: Sequence[Case]) -> None:
        """From now on ask for these, in turn; what runs is finished."""
        with self._lock:
            self._end_phase()
            self._cases = cases
            self.phases.append(Figures(name, monotonic()))
        if not self._clients:
            self._clients = [self._pool.submit(self._ask_in_turn) for _ in range(self._num_clients)]

    def check(self) -> None:
        """Raise what a client met, AssertionError for an answer with other tokens."""
        assert self.wrong == []
        for client in self._clients:
            if client.done():
                client.result()

    def _end_phase(self) -> None:
        if self.phases:
            self.phases[-1].ended_s = monotonic()

    def _ask_in_turn(self) -> None:
        while not self._stopped.is_set():
            with self._lock:
                case = self._cases[next(self._numbers) % len(self._cases)]
            self._ask(case)

    def _ask(self, case: Case) -> None:
        got: list[int] = []
        options = {"max_tokens": case.max_tokens, "ignore_eos": True, "seed": case.seed}
        for event in self._cluster.client.generate(case.prompt, deadline_s=DEADLINE_S, **options):
            if isinstance(event, Chunk):
                self._count(event, case, is_first=not got)
                got += [token.id for token in event.tokens]
        if tuple(got) != case.expected:
            self.wrong.append(f"{got} of {case}")
        with self._lock:
            if not self._stopped.is_set():
                self.phases[-1].requests += 1

    def _count(self, chunk: Chunk, case: Case, *, is_first: bool) -> None:
        with self._lock:
            if not self._stopped.is_set():
                self.phases[-1].prompt_tokens += len(case.prompt) if is_first else 0
                self.phases[-1].answer_tokens += len(chunk.tokens)
