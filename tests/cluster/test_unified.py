"""Workers that take whole requests: alone they are a cluster, beside prefill and decode workers a part of one. Every
answer is that of one engine without a cluster, whoever is killed or comes and goes; nothing stays held."""

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loopline.client import Completion
from loopline.engine.local import LocalEngine
from loopline.settings import EngineSettings
from tests.support.asking import RETURN_S, alone, prompt_of
from tests.support.cluster import LOOPLINE, Cluster, launched, wait_until, write_config
from tests.support.faulty import answers_alone, is_ready
from tests.support.golden import MODELS

BLOCK = 16
CASES = [(prompt_of(number, 21 + 13 * number), 12 + 5 * number) for number in range(6)]
NONE: dict[str, object] = {"replicas": 0}
UNIFIED: dict[str, object] = {"replicas": 2, "num_blocks": 96, "max_running": 8, "chunk_tokens": BLOCK}
pytestmark = pytest.mark.timeout(300, func_only=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    made = LocalEngine(
        EngineSettings(model_path=str(MODELS / "tiny-ouro"), dtype="fp32", num_blocks=96, prefix_cache="off")
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two unified workers on tiny-ouro, with prefix caches that requests follow, and nobody else."""
    folder = tmp_path_factory.mktemp("unified")
    groups = {"unified": UNIFIED, "prefill": NONE, "decode": NONE}
    sections: dict[str, dict[str, object]] = {"kv": {"prefix_cache": True}, "routing": {"policy": "prefix_aware"}}
    with launched(write_config(folder / "cluster.yaml", MODELS / "tiny-ouro", **groups, **sections), folder) as running:
        yield running


def ask_all(cluster: Cluster) -> list[Completion]:
    def ask(case: tuple[tuple[int, ...], int]) -> Completion:
        return cluster.client.complete(case[0], max_tokens=case[1], ignore_eos=True, deadline_s=RETURN_S)

    with ThreadPoolExecutor(len(CASES)) as pool:
        return list(pool.map(ask, CASES))


def routes(answers: list[Completion]) -> set[tuple[str, str]]:
    return {(one.finished.route.prefill, one.finished.route.decode) for one in answers if one.finished is not None}


def scale(cluster: Cluster, count: int) -> str:
    done = subprocess.run(
        [LOOPLINE, "scale", "--unified", str(count), "--address", cluster.address],
        capture_output=True,
        text=True,
        timeout=2 * RETURN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_two_unified_workers_are_a_cluster(cluster: Cluster, engine: LocalEngine) -> None:
    workers = cluster.workers()
    assert sorted(workers) == ["unified-0", "unified-1"]
    assert all((worker.role, worker.state, worker.links) == ("unified", "ready", ()) for worker in workers.values())
    answers = ask_all(cluster)
    assert [answer.token_ids for answer in answers] == answers_alone(engine, CASES)
    assert routes(answers) == {("unified-0", "unified-0"), ("unified-1", "unified-1")}
    assert all(one.finished is not None and one.finished.handoff is None for one in answers)
    cluster.wait_idle()


def test_the_second_turn_of_a_conversation_is_cached_where_the_first_was(cluster: Cluster, engine: LocalEngine) -> None:
    length, count, rest = 5 * BLOCK + 3, 20, 5
    prompt = prompt_of(9, length)
    first = cluster.client.complete(prompt, max_tokens=count, ignore_eos=True, deadline_s=RETURN_S)
    prompt += first.token_ids + prompt_of(10, rest)
    second = cluster.client.complete(prompt, max_tokens=count, ignore_eos=True, deadline_s=RETURN_S)
    assert second.token_ids == alone(engine, prompt, count)
    assert first.finished is not None and second.finished is not None
    assert second.finished.route == first.finished.route
    assert second.finished.usage.cached_tokens == (length + count - 1) // BLOCK * BLOCK


def test_what_a_killed_worker_had_goes_on_at_the_other_one(cluster: Cluster, engine: LocalEngine) -> None:
    expected = answers_alone(engine, CASES)
    before = cluster.workers()["unified-0"]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_all, cluster)
        wait_until(lambda: cluster.workers()["unified-0"].step > before.step + 3, "it computes", RETURN_S)
        os.kill(before.pid, signal.SIGKILL)
        answers = asked.result(2 * RETURN_S)
    assert [answer.token_ids for answer in answers] == expected
    moved = [one.finished.route for one in answers if one.finished is not None and one.finished.route.earlier]
    assert all(route.earlier == ("unified-0",) for route in moved)
    assert moved, "nobody was on the worker that was killed"
    wait_until(lambda: is_ready(cluster, "unified-0", but_pid=before.pid), "it was started again", RETURN_S)
    cluster.wait_idle()


def test_unified_workers_come_and_go_by_order(cluster: Cluster, engine: LocalEngine) -> None:
    expected = answers_alone(engine, CASES)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_all, cluster)
        assert "unified: 2 -> 1" in scale(cluster, 1)
        assert [answer.token_ids for answer in asked.result(2 * RETURN_S)] == expected
    assert sorted(cluster.workers()) == ["unified-0"]
    assert routes(ask_all(cluster)) == {("unified-0", "unified-0")}
    assert "unified: 1 -> 2" in scale(cluster, 2)
    assert is_ready(cluster, "unified-1")
    answers = ask_all(cluster)
    assert [answer.token_ids for answer in answers] == expected
    assert ("unified-1", "unified-1") in routes(answers)
    launcher = cluster.client.status().launcher
    assert launcher is not None and (launcher.prefill, launcher.decode, launcher.unified) == (0, 0, 2)
    cluster.wait_idle()


def test_beside_a_pair_a_unified_worker_takes_its_part(tmp_path: Path, engine: LocalEngine) -> None:
    """A request goes to either; what the unified worker had when it was killed goes on with the pair."""
    expected = answers_alone(engine, CASES)
    groups: dict[str, dict[str, object]] = {
        "unified": {**UNIFIED, "replicas": 1},
        "prefill": {"chunk_tokens": BLOCK},
        "launcher": {"restart": "never"},
    }
    with launched(write_config(tmp_path / "cluster.yaml", MODELS / "tiny-ouro", **groups), tmp_path) as cluster:
        wait_until(lambda: is_ready(cluster, "decode-0") and is_ready(cluster, "unified-0"), "all are ready", RETURN_S)
        answers = ask_all(cluster)
        assert [answer.token_ids for answer in answers] == expected
        assert routes(answers) == {("prefill-0", "decode-0"), ("unified-0", "unified-0")}
        before = cluster.workers()["unified-0"]
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask_all, cluster)
            wait_until(lambda: cluster.workers()["unified-0"].step > before.step + 3, "it computes", RETURN_S)
            os.kill(before.pid, signal.SIGKILL)
            assert [answer.token_ids for answer in asked.result(2 * RETURN_S)] == expected
        assert routes(ask_all(cluster)) == {("prefill-0", "decode-0")}
        cluster.wait_idle()
