"""Shared prefixes over several workers, policies against each other on one trace: how much is found in caches, and the
time to the first token.

Workers are scripted in virtual time: a prefill worker computes one prompt after the other, so many token-loops a
second. Its cache is modelled by the real ledger, so what stays is what would stay; the coordinator's side is the real
router, fed with the real reports. A decode worker holds a request for as long as its answer takes.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, quantiles
from typing import Any

from coordinator.effects import Assigned
from coordinator.policies import make_policy
from coordinator.registry import Registry
from coordinator.router import Round, Router
from loopline.bench.host import machine
from loopline.bench.router import BLOCK_SIZE, GROUP, LOOPS
from loopline.errors import InvariantBroken
from loopline.identity import Capacity, Peer, Role, WorkerId
from loopline.kv.digests import BlockDigests, noise_root
from loopline.kv.ledger import Ledger
from loopline.messages import PairReady, PrefixReport, Register
from loopline.noise_key import NO_NOISE
from loopline.request import Request, SamplingParams
from loopline.worker.prefix_reporter import PrefixReporter

_POLICIES = ("least_work", "power_of_two", "prefix_aware")  # requests here are no turns of sessions


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What comes, and what it comes to."""

    workers: int = 4
    """Of each role."""
    requests: int = 600
    prefixes: int = 24
    """Different beginnings that requests share, each as likely as the others."""
    prefix_tokens: int = 512
    own_tokens: int = 64
    """Of a prompt, behind its shared beginning."""
    answer_tokens: int = 64
    blocks: int = 512
    """Of each prefill worker: too few for all beginnings, enough for its part of them."""
    token_loops_per_s: float = 40_000.0
    token_s: float = 0.02
    """Of a decode worker, for each token of an answer."""
    load: float = 0.75
    """Arrivals, as part of what the prefill workers could compute with nothing cached."""
    slots: int = 4
    """Requests that a prefill worker may have at once."""


QUICK = Scenario(requests=40, prefixes=8, prefix_tokens=64, own_tokens=16, blocks=32)


def compare(scenario: Scenario, seed: int = 1, say: Callable[[str], None] = lambda part: None) -> dict[str, Any]:
    """All policies on the same requests at the same moments, as one JSON object."""
    arms = []
    for policy in _POLICIES:
        say(f"{scenario.requests} requests under {policy}")
        arms.append(_Run(policy, scenario, seed).figures())
    return {"machine": machine(), "scenario": vars(scenario), "seed": seed, "arms": arms}


class _PrefillWorker:
    """One prompt after the other; the ledger says what is cached."""

    def __init__(self, register: Register, scenario: Scenario, send: Callable[[PrefixReport], None]) -> None:
        self.worker = register.peer.worker
        self.queue: deque[str] = deque()
        self._rate = scenario.token_loops_per_s
        self._ledger = Ledger(scenario.blocks, BLOCK_SIZE)
        self.reporter = PrefixReporter(self._ledger.prefix, send)

    def compute(self, request: Request) -> tuple[int, float]:
        """Cached tokens, and seconds that the rest takes."""
        blocks = BlockDigests(noise_root(GROUP, LOOPS, NO_NOISE), BLOCK_SIZE)
        blocks.extend(request.prompt_ids)
        tokens = len(request.prompt_ids)
        allocation = self._ledger.reserve(tokens, tokens, blocks.digests[: (tokens - 1) // BLOCK_SIZE], LOOPS)
        if allocation is None:
            raise InvariantBroken(f"{tokens} tokens do not fit an idle worker of {self._ledger.total_blocks} blocks")
        cached = self._ledger.written_tokens(allocation, LOOPS)
        self._ledger.begin_run(allocation, cached, tokens - cached, LOOPS, 1)
        self._ledger.mark_written(allocation, cached, tokens - cached, LOOPS)
        self._ledger.publish(allocation, blocks.digests, LOOPS)
        self._ledger.step_done(1)
        self._ledger.release(allocation)
        return cached, (tokens - cached) * LOOPS / self._rate


class _Run:
    """One policy on the trace. Events are (moment, number, what)."""

    def __init__(self, policy: str, scenario: Scenario, seed: int) -> None:
        self._policy, self._scenario = policy, scenario
        self._registry, self._router = Registry(1e9), Router(make_policy(policy))
        self._table: dict[WorkerId, dict[str, Assigned]] = {}
        self._prefill: dict[WorkerId, _PrefillWorker] = {}
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._queue: deque[str] = deque()
        self._requests: dict[str, Request] = {}
        self._arrived_s: dict[str, float] = {}
        self._first_s: list[float] = []
        self._cached = 0
        self._join()
        self._arrive(random.Random(seed))

    def figures(self) -> dict[str, Any]:
        while self._events:
            self._now_s, _, happens = heapq.heappop(self._events)
            happens()
            self._place()
        if len(self._first_s) != len(self._requests):
            raise InvariantBroken(f"{len(self._requests) - len(self._first_s)} requests were never placed")
        tokens = sum(len(request.prompt_ids) for request in self._requests.values())
        shared = self._scenario.prefix_tokens * len(self._requests)
        cuts = quantiles(self._first_s, n=100)
        return {
            "policy": self._policy,
            "cached_tokens": self._cached,
            "hit_rate": self._cached / tokens,
            "shared_hit_rate": self._cached / shared,
            "ttft_mean_s": mean(self._first_s),
            "ttft_p50_s": cuts[49],
            "ttft_p99_s": cuts[98],
            "total_s": self._now_s,
        }

    def _join(self) -> None:
        registers = []
        for role in (Role.PREFILL, Role.DECODE):
            for number in range(self._scenario.workers):
                name = f"{role}-{number}"
                slots = self._scenario.slots if role is Role.PREFILL else 10_000
                blocks = self._scenario.blocks * (1 if role is Role.PREFILL else 10_000)
                capacity = Capacity(block_size=BLOCK_SIZE, total_blocks=blocks, max_running=slots, token_bytes=1)
                one = Register(Peer(WorkerId(name, 1), name, f"127.0.0.1:{name}"), role, 1, GROUP, capacity)
                self._registry.join(one, 0.0)
                self._router.joined(one, 0.0)
                self._table[one.peer.worker] = {}
                registers.append(one)
        for one in registers[: self._scenario.workers]:
            for other in registers[self._scenario.workers :]:
                self._registry.pair_ready(one.peer.worker, PairReady(other.peer.worker, "bench", 1e9))
            self._prefill[one.peer.worker] = worker = _PrefillWorker(one, self._scenario, self._taker(one.peer.worker))
            worker.reporter.ask()

    def _taker(self, worker: WorkerId) -> Callable[[PrefixReport], None]:
        def take(report: PrefixReport) -> None:
            self._router.reported(worker, report, self._now_s)

        return take

    def _arrive(self, draws: random.Random) -> None:
        scenario = self._scenario
        prompt_s = (scenario.prefix_tokens + scenario.own_tokens) * LOOPS / scenario.token_loops_per_s
        rate = scenario.load * scenario.workers / prompt_s
        moment_s = 0.0
        for number in range(scenario.requests):
            moment_s += draws.expovariate(rate)
            kind = draws.randrange(scenario.prefixes)
            prefix = range(kind * 1_000, kind * 1_000 + scenario.prefix_tokens)
            own = (draws.randrange(1 << 20) for _ in range(scenario.own_tokens))
            request = Request(
                request_id=f"{number}",
                prompt_ids=(*prefix, *own),
                params=SamplingParams(max_tokens=scenario.answer_tokens, loops=LOOPS),
            )
            self._requests[request.request_id] = request
            self._at(moment_s, self._arrival(request.request_id))

    def _arrival(self, request_id: str) -> Callable[[], None]:
        def happens() -> None:
            self._arrived_s[request_id] = self._now_s
            self._queue.append(request_id)

        return happens

    def _at(self, moment_s: float, happens: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (moment_s, self._num_events, happens))

    def _place(self) -> None:
        """First come, first served, both workers at once: the answers to Reserve and Bind take no time here."""
        if not self._queue:
            return
        table = {worker: tuple(rows.values()) for worker, rows in self._table.items()}
        placing = self._router.begin(self._registry.snapshot(0.0, table), self._now_s)
        while self._queue and self._give(placing, self._requests[self._queue[0]]):
            self._queue.popleft()

    def _give(self, placing: Round, request: Request) -> bool:
        decode = placing.choose_decode(request)
        prefill = None if decode is None else placing.choose_prefill(request, decode.worker)
        if decode is None or prefill is None:
            return False
        known, work = request.num_known_tokens, request.params.max_tokens * LOOPS
        own = (known - placing.cached_tokens(request, prefill)) * LOOPS
        name = request.request_id
        rows = {
            decode.worker: Assigned(name, known, request.max_kv_tokens, work, False),
            prefill.worker: Assigned(name, known, request.max_kv_tokens, own, False, decode.worker),
        }
        placing.placed(request, {}, rows)
        for worker, row in rows.items():
            self._table[worker][name] = row
        self._router.ended(name)
        queue = self._prefill[prefill.worker].queue
        queue.append(name)
        if len(queue) == 1:
            self._start(self._prefill[prefill.worker], decode.worker)
        return True

    def _start(self, worker: _PrefillWorker, decode: WorkerId) -> None:
        request = self._requests[worker.queue[0]]
        cached, taken_s = worker.compute(request)
        self._cached += cached

        def done() -> None:
            name = worker.queue.popleft()
            self._first_s.append(self._now_s - self._arrived_s[name])
            target = self._table[worker.worker].pop(name).decode or decode
            self._at(self._now_s + request.params.max_tokens * self._scenario.token_s, self._leave(target, name))
            worker.reporter.maybe_report(self._now_s, busy=False)
            if worker.queue:
                self._start(worker, decode)

        self._at(self._now_s + taken_s, done)

    def _leave(self, decode: WorkerId, request_id: str) -> Callable[[], None]:
        def happens() -> None:
            del self._table[decode][request_id]

        return happens
