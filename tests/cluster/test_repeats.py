"""A cluster in which every message between workers and coordinator comes twice, on a decode worker with room for two
answers and no more: what is offered beyond that waits, whoever leaves frees what it held, and nobody's tokens change.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from loopline.engine.local import LocalEngine
from loopline.faults import MESSAGES
from tests.cluster.test_faults import check_committed
from tests.support.asking import Stream, alone, ask, prompt_of
from tests.support.cluster import Cluster, wait_until
from tests.support.faulty import faulty
from tests.support.golden import SMALL

BLOCK, WORST_CASE_BLOCKS = 16, 3
NUM_TOKENS = BLOCK * WORST_CASE_BLOCKS
LONG_ANSWER = 24
ALWAYS = 1_000_000
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("repeats")


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Cluster]:
    faults: list[dict[str, object]] = [
        {"worker": f"{role}-0", "do": "repeat_message", "message": message, "times": ALWAYS}
        for role in ("prefill", "decode")
        for message in MESSAGES[role]
        if (role, message) != ("prefill", "Cancel")
    ]
    faults += [
        {"worker": "prefill-0", "do": "delay_push", "at": 2, "seconds": 6.0},
        {"worker": "prefill-0", "do": "drop_message", "message": "Cancel"},
        {"worker": "prefill-0", "do": "repeat_message", "message": "Cancel", "at": 2, "times": ALWAYS},
    ]
    groups: dict[str, dict[str, object]] = {
        "prefill": {"num_blocks": 64, "chunk_tokens": BLOCK},
        "decode": {"num_blocks": 2 * WORST_CASE_BLOCKS, "max_running": 8},
        "membership": {"lease_s": 30.0, "reply_timeout_s": 30.0},  # some tests make a worker stand still
    }
    with faulty(folder, *faults, checkpoint=SMALL, **groups) as running:
        yield running


def test_a_prefill_worker_whose_cancel_is_lost_is_told_by_the_decode_worker(cluster: Cluster, folder: Path) -> None:
    """The client leaves when its prompt is computed and a push is still on its way, and only the decode worker hears of
    it: what was committed goes on nowhere, and the prefill worker lets go of the prompt."""
    stream = Stream(cluster, prompt_of(1, NUM_TOKENS - 2), 2)
    stream.wait_token()
    stream.leave()
    cluster.wait_idle()
    check_committed(folder, "prefill-0", "drop_message of Cancel 1")


def test_what_is_said_twice_counts_once(cluster: Cluster, small_engine: LocalEngine) -> None:
    cases = [(prompt_of(n, 20 + 13 * n), 6 + n) for n in range(4)]
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(lambda case: ask(cluster, *case), cases))
    assert answers == [alone(small_engine, *case) for case in cases]
    stream = Stream(cluster, prompt_of(5, 40), LONG_ANSWER)
    stream.wait_token()
    stream.leave()
    cluster.wait_idle()
    for name in ("prefill-0", "decode-0"):
        wait_until(lambda name=name: sum(cluster.workers()[name].ignored.values()), f"{name} counts what it ignored")


def test_six_long_answers_share_the_room_of_two(cluster: Cluster, small_engine: LocalEngine) -> None:
    """Room for the worst case is promised before an answer is let in, so nobody ends halfway; the others wait with the
    coordinator."""
    prompts = [prompt_of(10 + n, NUM_TOKENS - LONG_ANSWER) for n in range(6)]
    most_running, most_held = 0, 0
    with ThreadPoolExecutor(len(prompts)) as pool:
        with cluster.stopped("decode-0"):
            futures = [pool.submit(ask, cluster, prompt, LONG_ANSWER) for prompt in prompts]
            wait_until(lambda: cluster.client.status().queued == 4, "more are offered than fit")
        while wait(futures, timeout=0.2).not_done:
            worker = cluster.workers()["decode-0"]
            most_running = max(most_running, worker.running)
            most_held = max(most_held, worker.blocks.held)
        answers = [future.result() for future in futures]
    assert most_running <= 2 and most_held <= 2 * WORST_CASE_BLOCKS
    assert answers == [alone(small_engine, prompt, LONG_ANSWER) for prompt in prompts]
    cluster.wait_idle()


def test_who_leaves_before_it_was_given_any_room_holds_none(cluster: Cluster, small_engine: LocalEngine) -> None:
    with cluster.stopped("decode-0"):
        running = Stream(cluster, prompt_of(20, 20), 2 * NUM_TOKENS - 20)  # is promised the whole arena
        wait_until(lambda: cluster.client.status().running == 1, "one is placed")
        waiting = Stream(cluster, prompt_of(22, 20), 4)
        wait_until(lambda: cluster.client.status().queued == 1, "one waits")
        waiting.leave()
        wait_until(lambda: cluster.client.status().queued == 0, "nobody waits any more")
        running.leave()
    cluster.wait_idle()
    prompt = prompt_of(23, 20)
    assert ask(cluster, prompt, 4) == alone(small_engine, prompt, 4)


def test_a_clients_own_id_names_nothing(cluster: Cluster, small_engine: LocalEngine) -> None:
    """Two requests of one label at once, then one that comes again under the label of one that has just left."""
    cases = [(prompt_of(30 + n, 30 + 20 * n), 8) for n in range(2)]
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(lambda case: ask(cluster, *case, label="same"), cases))
    assert answers == [alone(small_engine, *case) for case in cases]
    for n in range(3):
        stream = Stream(cluster, prompt_of(40 + n, NUM_TOKENS - 20), 20, label="same")
        stream.leave()
        assert ask(cluster, *cases[1], label="same") == answers[1]
    cluster.wait_idle()


def test_all_leave_at_the_same_moment_again_and_again(cluster: Cluster, small_engine: LocalEngine) -> None:
    leave_together(cluster, rounds=4)
    prompt = prompt_of(50, 40)
    assert ask(cluster, prompt, 6) == alone(small_engine, prompt, 6)


@pytest.mark.soak
def test_all_leave_at_the_same_moment_fifty_times(cluster: Cluster, small_engine: LocalEngine) -> None:
    leave_together(cluster, rounds=50)
    prompt = prompt_of(50, 40)
    assert ask(cluster, prompt, 6) == alone(small_engine, prompt, 6)


def leave_together(cluster: Cluster, rounds: int, count: int = 6) -> None:
    """Send `count` requests and let all of them leave once `k` have a token, k another number in each round; after each
    round everything is free, although nothing new comes that could set a clean-up going."""
    for round_ in range(rounds):
        streams = [Stream(cluster, prompt_of(7 * round_ + n, 10 + 11 * n), 8) for n in range(count)]
        for stream in streams[: round_ % 3]:
            stream.wait_token()
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(Stream.leave, streams))
        cluster.wait_idle()
