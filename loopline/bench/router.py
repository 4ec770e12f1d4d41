"""What a routing decision costs, by policy and by the number of workers and of queued requests: one process, no wire.

Registry, tracker and router are the coordinator's own; workers are what they have registered and been given. Half are
prefill, half decode workers, all linked, each with half of its slots taken. Arms alternate in one run. `wake` is what a
request waits for that finds an idle coordinator: the snapshot, the books of a round and one decision. `decision` is
each further one of the same round. Times are the thread's own on the processor, so others' load falls on none of them.
The plain arm is `loopline.bench.router_plain`, with the least work.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from coordinator.effects import Assigned
from coordinator.policies import make_policy
from coordinator.registry import Registry
from coordinator.router import Router
from coordinator.snapshot import ClusterSnapshot
from coordinator.tracker import Tracker
from loopline.bench import router_plain
from loopline.bench.host import machine
from loopline.clock import MonotonicClock
from loopline.identity import BlockRun, Capacity, Fingerprint, HandoffKey, Peer, Role, WorkerId
from loopline.kv.digests import BlockDigests, noise_root
from loopline.messages import (
    CUT_DIGEST_BYTES,
    Granted,
    HandoffStats,
    PairReady,
    Prefilled,
    PrefixReport,
    Register,
    Reserved,
    TokenRow,
)
from loopline.noise_key import NO_NOISE
from loopline.request import Request, SamplingParams

POLICIES = ("least_work", "power_of_two", "prefix_aware", "session_affinity")
PLAIN = "plain"
GROUP = Fingerprint((("weights", "bench"), ("block_size", "16")))
BLOCK_SIZE, LOOPS = 16, 4
_PROMPT_TOKENS, _ANSWER_TOKENS = 256, 128
_NUM_PREFIXES, _PREFIX_TOKENS = 64, 192
_SLOTS = {Role.PREFILL: 4, Role.DECODE: 32}
_STATS = HandoffStats(pushes=1, descriptors=1, num_bytes=1, transport="bench", prefill_s=0.0)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured, and how often."""

    workers: tuple[int, ...] = (10, 100, 1000)
    queued: tuple[int, ...] = (10, 100, 1000, 10_000)
    rounds: int = 15
    """Rounds of each arm behind a median."""
    decisions: int = 20
    """Most decisions of a round."""
    plain_s: float = 0.1
    """Once a decision of the plain arm takes longer than this it is left out."""


QUICK = Sizes(workers=(4, 10), queued=(4, 10), rounds=2, decisions=3)


def measure(sizes: Sizes, say: Callable[[str], None] = lambda part: None) -> dict[str, Any]:
    """All figures as one JSON object; times are medians in microseconds."""
    points: list[dict[str, Any]] = []
    slow_from: int | None = None  # workers at which the plain arm took too long
    for num_workers in sizes.workers:
        for num_queued in sizes.queued:
            say(f"{num_workers} workers, {num_queued} queued")
            arms: tuple[str, ...] = POLICIES
            if slow_from is None or num_workers < slow_from:
                arms = (*POLICIES, PLAIN)
            figures = _measure_point(Scene(num_workers, num_queued), arms, sizes)
            points += figures
            plain = next((one for one in figures if one["arm"] == PLAIN), None)
            if plain is not None and plain["decision_us"] > sizes.plain_s * 1e6:
                slow_from = num_workers
    return {"machine": machine(), "points": points}


class Scene:
    """A coordinator's books at one moment: workers half full, and requests that wait."""

    def __init__(self, num_workers: int, num_queued: int) -> None:
        self.num_workers, self.num_queued = num_workers, num_queued
        self.registry, self.tracker = Registry(3600.0, None, 0.5), Tracker(MonotonicClock())
        prefill = [self._join(Role.PREFILL, n) for n in range(max(1, num_workers // 2))]
        decode = [self._join(Role.DECODE, n) for n in range(max(1, num_workers - num_workers // 2))]
        for writer in prefill:
            for target in decode:
                self.registry.pair_ready(writer.peer.worker, PairReady(target.peer.worker, "bench", 1e9))
        self.workers = [*prefill, *decode]
        self._fill(prefill, decode)
        self.queued = [make_request(f"queued-{n}", n) for n in range(num_queued)]
        for request in self.queued:
            self.tracker.admit(request, 3600.0)

    def snapshot(self) -> ClusterSnapshot:
        return self.registry.snapshot(0.0, self.tracker.assigned())

    def router(self, policy: str) -> Router:
        """With what the policy may want to know: a quarter of all prefixes cached at each worker, every session."""
        router = Router(make_policy(policy))
        root = noise_root(GROUP, LOOPS, NO_NOISE)
        chains = []
        for number in range(_NUM_PREFIXES):
            blocks = BlockDigests(root, BLOCK_SIZE)
            blocks.extend(make_request("", number).prompt_ids[:_PREFIX_TOKENS])
            chains.append(b"".join(digest[:CUT_DIGEST_BYTES] for digest in blocks.digests))
        for place, one in enumerate(self.workers):
            worker = one.peer.worker
            router.joined(one, 0.0)
            held = b"".join(chains[place % 4 :: 4])
            router.reported(worker, PrefixReport(0, True, 0, 1, held, b""), 0.0)
        for number, request in enumerate(self.queued):
            one = self.workers[number % len(self.workers)]
            router.sessions.placed(request.session, one.role, one.peer.worker)
        return router

    def _join(self, role: Role, number: int) -> Register:
        name = f"{role}-{number}"
        capacity = Capacity(block_size=BLOCK_SIZE, total_blocks=4096, max_running=_SLOTS[role], token_bytes=1)
        one = Register(Peer(WorkerId(f"uuid-{name}", 1), name, f"127.0.0.1:{name}"), role, 1, GROUP, capacity)
        self.registry.join(one, 0.0)
        return one

    def _fill(self, prefill: Sequence[Register], decode: Sequence[Register]) -> None:
        """Half of each worker's slots."""
        tracker = self.tracker
        for number in range(len(decode) * _SLOTS[Role.DECODE] // 2):
            request = make_request(f"running-{number}", number)
            target, writer = decode[number % len(decode)].peer, prefill[number % len(prefill)].peer
            key = HandoffKey(request.request_id, 1)
            tracker.admit(request, 3600.0)
            tracker.reserve(request.request_id, target)
            tracker.on_reserved(target.worker, Reserved(key))
            tracker.bind(request.request_id, writer)
            tracker.on_granted(target.worker, Granted(key, writer.worker, 0, (BlockRun(0, 1),)))
            if number >= len(prefill) * _SLOTS[Role.PREFILL] // 2:  # its prompt is done
                token = TokenRow(request.request_id, 1, request.num_known_tokens, 1, LOOPS)
                tracker.on_prefilled(writer.worker, Prefilled(key, 1, token, _STATS))


def make_request(name: str, number: int) -> Request:
    """One whose first tokens are those of every _NUM_PREFIXES-th, in a session of its own."""
    first = number % _NUM_PREFIXES * 10_000
    prompt = (*range(first, first + _PREFIX_TOKENS), *range(number, number + _PROMPT_TOKENS - _PREFIX_TOKENS))
    params = SamplingParams(max_tokens=_ANSWER_TOKENS, loops=LOOPS)
    return Request(request_id=name, prompt_ids=prompt, params=params, session=f"session-{number}")


def _measure_point(scene: Scene, arms: Sequence[str], sizes: Sizes) -> list[dict[str, Any]]:
    routers = {arm: scene.router(arm) for arm in arms if arm != PLAIN}
    times: dict[str, list[tuple[float, list[float]]]] = {arm: [] for arm in arms}
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        for number in range(sizes.rounds):
            for arm in (*arms[number % len(arms) :], *arms[: number % len(arms)]):
                if arm == PLAIN:
                    if not times[arm] or times[arm][-1][0] < sizes.plain_s * 1e6:
                        times[arm].append(_plain_round(scene, sizes.decisions, sizes.plain_s))
                else:
                    times[arm].append(_round(scene, routers[arm], sizes.decisions))
            gc.collect()
    finally:
        if is_collecting:
            gc.enable()
    return [_figures(scene, arm, rounds) for arm, rounds in times.items()]


def _round(scene: Scene, router: Router, decisions: int) -> tuple[float, list[float]]:
    """Microseconds of the first decision with all that it needs, and of each further one."""
    taken = []
    began_s = time.thread_time()
    placing = router.begin(scene.snapshot(), 0.0)
    for request in scene.queued[:decisions]:
        view = placing.choose_decode(request)
        if view is None:
            break
        placing.placed(request, {}, {view.worker: _row(request)})
        taken.append((time.thread_time() - began_s) * 1e6)
        began_s = time.thread_time()
    return taken[0], taken[1:]


def _plain_round(scene: Scene, decisions: int, most_s: float) -> tuple[float, list[float]]:
    """The same, ended by a decision that takes longer than `most_s`."""
    taken: list[float] = []
    began_s = time.thread_time()
    snapshot = scene.snapshot()
    for request in scene.queued[:decisions]:
        view = router_plain.choose_decode(request, snapshot)
        if view is None or (taken and taken[-1] >= most_s * 1e6):
            break
        snapshot = router_plain.with_request(snapshot, {view.worker: _row(request)})
        taken.append((time.thread_time() - began_s) * 1e6)
        began_s = time.thread_time()
    return taken[0], taken[1:]


def _row(request: Request) -> Assigned:
    known, most = request.num_known_tokens, request.max_kv_tokens
    return Assigned(request.request_id, known, most, _ANSWER_TOKENS * LOOPS, True, num_started_tokens=known)


def _figures(scene: Scene, arm: str, rounds: Sequence[tuple[float, list[float]]]) -> dict[str, Any]:
    wake_us = median(first for first, _ in rounds)
    further = [one for _, taken in rounds for one in taken]
    decision_us = median(further) if further else wake_us
    return {
        "workers": scene.num_workers,
        "queued": scene.num_queued,
        "arm": arm,
        "wake_us": wake_us,
        "decision_us": decision_us,
        "decisions_per_s": 1e6 / decision_us,
        "rounds": len(rounds),
    }
