"""Pushes that fail, come late or are overtaken by their client, one after the other in one cluster: blocks that
may still be written are nobody's until they cannot be, and what a client gets is right or a clear error.

Each test counts pushes from the one that made the cluster ready, so they build on each other and run in order.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from coordinator.tracker import MAX_FRUITLESS_ATTEMPTS
from loopline.client import WorkerInfo
from loopline.engine.local import LocalEngine
from loopline.errors import LooplineError
from tests.cluster.test_faults import check_committed
from tests.support.asking import Stream, alone, ask, prompt_of
from tests.support.cluster import Cluster, wait_until
from tests.support.faulty import faulty, is_ready
from tests.support.golden import SMALL

BLOCK = 16
NUM_CHUNKS = 4
PROMPT_TOKENS, ANSWER = BLOCK * NUM_CHUNKS, BLOCK
ARENA_BLOCKS = 8
FIRST_FAILED = 2
DELAYED = FIRST_FAILED + MAX_FRUITLESS_ATTEMPTS + 2
"""The third push of the first request after the failed ones."""
BROKEN = DELAYED + 1 + NUM_CHUNKS + 3
"""The third push of the request after the next."""
DELAY_S, RETURN_S, SOON_S = 6.0, 60.0, 15.0
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("broken-pushes")


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Cluster]:
    faults: list[dict[str, object]] = [
        {"do": "fail_push", "at": FIRST_FAILED, "times": MAX_FRUITLESS_ATTEMPTS},
        {"do": "delay_push", "at": DELAYED, "seconds": DELAY_S},
        {"do": "delay_push", "at": BROKEN - 2, "times": 2, "seconds": DELAY_S},
        {"do": "fail_handle", "at": BROKEN},
    ]
    groups: dict[str, dict[str, object]] = {
        "prefill": {"num_blocks": 64, "chunk_tokens": BLOCK},
        "decode": {"num_blocks": ARENA_BLOCKS, "max_running": 8},
    }
    with faulty(folder, *({"worker": "prefill-0", **fault} for fault in faults), checkpoint=SMALL, **groups) as running:
        yield running


def test_pushes_that_always_fail_end_soon_in_an_error_without_tokens(cluster: Cluster, folder: Path) -> None:
    began_s = time.monotonic()
    stream = Stream(cluster, prompt_of(1, PROMPT_TOKENS), ANSWER)
    with pytest.raises(LooplineError, match=f"{MAX_FRUITLESS_ATTEMPTS} attempts"):
        stream.wait_token()
    assert time.monotonic() - began_s < SOON_S  # and not with the deadline
    stream.leave()
    check_committed(folder, "prefill-0", f"fail_push of push {FIRST_FAILED + MAX_FRUITLESS_ATTEMPTS - 1}")
    cluster.wait_idle()


def test_blocks_of_a_client_that_left_wait_for_the_push_that_still_comes(
    cluster: Cluster, folder: Path, small_engine: LocalEngine
) -> None:
    """A second client wants the whole arena, under the same label: it gets no token while a block may be written."""
    leaving = Stream(cluster, prompt_of(2, PROMPT_TOKENS), ANSWER, label="again")
    leaving.wait_token()
    leaving.leave()
    check_committed(folder, "prefill-0", f"delay_push of push {DELAYED}")
    wait_until(lambda: cluster.workers()["decode-0"].blocks.quarantined, "a block waits for its push")
    prompt = prompt_of(3, PROMPT_TOKENS)
    second = Stream(cluster, prompt, ARENA_BLOCKS * BLOCK - PROMPT_TOKENS, label="again")
    tokens = second.wait_token()
    assert not cluster.workers()["decode-0"].blocks.quarantined
    tokens += second.wait_token()
    assert tokens == alone(small_engine, prompt, len(tokens))
    second.leave()
    cluster.wait_idle()


def test_a_failed_push_holds_every_block_of_its_siblings(
    cluster: Cluster, folder: Path, small_engine: LocalEngine
) -> None:
    """Push 3 of 4 fails while 1 and 2 are on their way. The prompt's blocks are kept until these have ended, and, as
    nobody knows what the failed one may still do, until the other process is gone. The request runs again before."""
    prompt = prompt_of(4, PROMPT_TOKENS)
    stream = Stream(cluster, prompt, ANSWER)

    def closing() -> WorkerInfo | None:
        worker = cluster.workers()["prefill-0"]
        return worker if worker.handoffs.get("closing") else None

    given_up = wait_until(closing, "the handoff is given up")
    assert given_up is not None
    assert given_up.blocks.held == NUM_CHUNKS and not given_up.blocks.quarantined
    check_committed(folder, "prefill-0", f"fail_handle of push {BROKEN}")
    tokens: tuple[int, ...] = ()
    while len(tokens) < ANSWER:
        tokens += stream.wait_token()
    assert tokens == alone(small_engine, prompt, ANSWER)
    stream.leave()
    wait_until(lambda: cluster.workers()["prefill-0"].blocks.quarantined == NUM_CHUNKS, "all siblings have ended")
    pid = cluster.workers()["decode-0"].pid
    psutil.Process(pid).kill()
    wait_until(lambda: is_ready(cluster, "decode-0", pid), "it was started again", RETURN_S)
    cluster.wait_idle()


def test_the_undisturbed_way_lets_go_at_once(cluster: Cluster, small_engine: LocalEngine) -> None:
    """Of the prompt's blocks, although the answer goes on."""
    prompt = prompt_of(5, PROMPT_TOKENS)
    stream = Stream(cluster, prompt, ANSWER)
    stream.wait_token()
    wait_until(lambda: not cluster.workers()["prefill-0"].blocks.held, "the prefill worker holds nothing")
    stream.leave()
    assert ask(cluster, prompt, ANSWER) == alone(small_engine, prompt, ANSWER)
    cluster.wait_idle()
