"""The three ways in which a decode worker gets what it lacks of a prompt, each forced, over a conversation of three
turns with real processes and real NIXL: every turn's tokens are those of one engine without a cache, and what is moved
goes with a turn's new tokens and not with the conversation. And fetches that go wrong: the same tokens."""

import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from loopline.engine.local import LocalEngine
from loopline.settings import EngineSettings
from tests.support.asking import RETURN_S, alone, prompt_of
from tests.support.cluster import Cluster, wait_until
from tests.support.faulty import Fault, faulty, has_committed, is_ready
from tests.support.golden import MODELS, SMALL

BLOCK = 16
FIRST, REST, ANSWER = 9 * BLOCK + 3, 5, 20
NEW = REST + ANSWER
"""Tokens that each turn adds."""
MOST_NEW_BLOCKS = -(-NEW // BLOCK) + 1
"""Blocks that hold them: some of the last turn's last one."""


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    yield from cold(SMALL)


@pytest.fixture(scope="module")
def huginn_engine() -> Iterator[LocalEngine]:
    yield from cold(MODELS / "tiny-huginn")


def cold(checkpoint: Path) -> Iterator[LocalEngine]:
    settings = EngineSettings(model_path=str(checkpoint), dtype="fp32", num_blocks=64, prefix_cache="off")
    engine = LocalEngine(replace(settings, noise_key="position"))
    yield engine
    engine.close()


def groups(source: str, **transfer: object) -> dict[str, dict[str, object]]:
    return {
        "kv": {"prefix_cache": True},
        "routing": {"prefix_source": source},
        "telemetry": {"metrics_port": 0},
        "transfer": transfer,
    }


@dataclass(frozen=True)
class Turn:
    """What one turn was answered with, its prompt's length, and what it has moved."""

    prompt_tokens: int
    source: str
    cached_tokens: int
    pushed_bytes: int
    fetched_bytes: int


class Conversation:
    """Each turn resends the one before, its answer and some new tokens. Every answer's tokens must be those of one
    engine without a cache."""

    def __init__(self, cluster: Cluster, engine: LocalEngine) -> None:
        self._cluster = cluster
        self._engine = engine
        self._prompt = prompt_of(1, FIRST)
        self._number = 1

    def turn(self) -> Turn:
        prompt = self._prompt
        answer = self._cluster.client.complete(prompt, max_tokens=ANSWER, ignore_eos=True, deadline_s=RETURN_S)
        assert answer.token_ids == alone(self._engine, prompt, ANSWER), f"turn {self._number}"
        assert answer.finished is not None
        self._number += 1
        self._prompt += answer.token_ids + prompt_of(self._number, REST)
        moved, route = answer.finished.handoff, answer.finished.route
        cached = answer.finished.usage.cached_tokens
        num_bytes, fetched = (0, 0) if moved is None else (moved.num_bytes, moved.fetched_bytes)
        return Turn(len(prompt), route.prefix_source, cached, num_bytes, fetched)


def converse(cluster: Cluster, engine: LocalEngine, turns: int = 3) -> list[Turn]:
    """The turns of one conversation; afterwards nothing is held."""
    talk = Conversation(cluster, engine)
    out = [talk.turn() for _ in range(turns)]
    cluster.wait_idle()
    return out


def block_bytes(cluster: Cluster) -> int:
    return cluster.client.model().kv_bytes_per_token * BLOCK


def metric(cluster: Cluster, worker: str, sample: str) -> float:
    """One sample of a process's scrape; "": of the coordinator's, whose address is in its log."""
    address = cluster.workers()[worker].metrics_address if worker else coordinator_metrics(cluster)
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=RETURN_S) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{sample} "))


@pytest.mark.parametrize("source", ["local", "recompute", "fetch"])
def test_each_way_gives_the_tokens_of_a_cold_run_of_huginn(
    tmp_path: Path, huginn_engine: LocalEngine, source: str
) -> None:
    """With noise that is keyed by position; every request has a seed of its own."""
    sections: dict[str, dict[str, object]] = {**groups(source), "model": {"noise_key": "position"}}
    with faulty(tmp_path, checkpoint=MODELS / "tiny-huginn", **sections) as cluster:
        first, *later = converse(cluster, huginn_engine)
        assert first.cached_tokens == 0
        for turn in later:
            assert (turn.source, turn.cached_tokens > 0, turn.fetched_bytes > 0) == (source, True, source == "fetch")
            assert turn.pushed_bytes <= MOST_NEW_BLOCKS * block_bytes(cluster)


@pytest.mark.parametrize("source", ["local", "recompute", "fetch"])
def test_each_way_gives_the_tokens_of_a_cold_run_and_moves_what_is_new(
    tmp_path: Path, engine: LocalEngine, source: str
) -> None:
    with faulty(tmp_path, checkpoint=SMALL, **groups(source)) as cluster:
        size = block_bytes(cluster)
        first, *later = converse(cluster, engine)
        assert first.cached_tokens == first.fetched_bytes == 0
        assert first.source == ("local" if source == "local" else "recompute"), "there was nothing to fetch"
        assert first.pushed_bytes == (0 if source == "local" else -(-FIRST // BLOCK) * size)
        for turn in later:
            assert turn.source == source
            in_decode = (turn.prompt_tokens - REST - 1) // BLOCK * BLOCK  # an answer's last token is never computed
            if source == "recompute":  # it has its own prompts, and the answers never
                assert 0 < turn.cached_tokens < in_decode
            else:
                assert turn.cached_tokens == in_decode
            assert turn.pushed_bytes == (0 if source == "local" else turn_blocks(turn) * size)
            assert turn.pushed_bytes <= MOST_NEW_BLOCKS * size
            assert (turn.fetched_bytes > 0) == (source == "fetch")
            assert turn.fetched_bytes <= MOST_NEW_BLOCKS * size
        fetched = metric(cluster, "prefill-0", "loopline_fetched_bytes_total")
        assert fetched == sum(turn.fetched_bytes for turn in later)
        assert metric(cluster, "", f'loopline_prefix_sources_total{{source="{source}"}}') >= len(later)


def coordinator_metrics(cluster: Cluster) -> str:
    log = (cluster.run_dir / "coordinator.log").read_text(encoding="utf-8")
    found = re.search(r"metrics are at http://([^/]+)/metrics", log)
    assert found is not None, log
    return found.group(1)


def turn_blocks(turn: Turn) -> int:
    """Blocks that the decode worker lacks of a later turn's prompt."""
    return -(-turn.prompt_tokens // BLOCK) - (turn.prompt_tokens - REST - 1) // BLOCK


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"worker": "decode-0", "do": "fail_push"}, "fail_push of push 1"),
        ({"worker": "decode-0", "do": "fail_handle"}, "fail_handle of push 1"),
        ({"worker": "decode-0", "do": "drop_push"}, "drop_push of push 1"),
        ({"worker": "prefill-0", "do": "drop_notice"}, "drop_notice of notice 1"),
    ],
    ids=["failed", "failed-after-post", "never-sent", "unheard"],
)
def test_a_fetch_that_fails_or_is_late_costs_no_token(
    tmp_path: Path, engine: LocalEngine, fault: Fault, words: str
) -> None:
    """What was to be fetched is computed. A push that never ends keeps its blocks until a process is gone."""
    with faulty(tmp_path, fault, checkpoint=SMALL, **groups("fetch", push_timeout_s=2.0)) as cluster:
        talk = Conversation(cluster, engine)
        assert [talk.turn().source for _ in range(3)][:2] == ["recompute", "recompute"]
        assert has_committed(tmp_path, str(fault["worker"]), words)
        wait_until(lambda: talk.turn().source == "fetch", "a second after the failure it is fetched again")
        if fault["do"] in ("fail_push", "drop_notice"):  # nothing was posted, or all of it has arrived
            cluster.wait_idle()


def test_a_decode_worker_that_is_killed_while_it_lends_costs_no_token(tmp_path: Path, engine: LocalEngine) -> None:
    fault: Fault = {"worker": "decode-0", "do": "kill", "at": "pushing"}
    with faulty(tmp_path, fault, checkpoint=SMALL, **groups("fetch")) as cluster:
        pid = cluster.workers()["decode-0"].pid
        first, second, third = converse(cluster, engine)
        assert has_committed(tmp_path, "decode-0", "kill at pushing 1")
        assert (first.source, second.source) == ("recompute", "recompute"), "its cache has gone with it"
        assert third.source == "fetch"
        wait_until(lambda: is_ready(cluster, "decode-0", but_pid=pid), "it was started again")
        cluster.wait_idle()


def test_a_prefill_worker_that_is_killed_while_it_fetches_costs_no_token(tmp_path: Path, engine: LocalEngine) -> None:
    fault: Fault = {"worker": "prefill-0", "do": "kill", "at": "fetching"}
    with faulty(tmp_path, fault, checkpoint=SMALL, **groups("fetch")) as cluster:
        pid = cluster.workers()["prefill-0"].pid
        turns = converse(cluster, engine)
        assert has_committed(tmp_path, "prefill-0", "kill at fetching 1")
        assert [turn.source for turn in turns] == ["recompute", "fetch", "fetch"]
        wait_until(lambda: is_ready(cluster, "prefill-0", but_pid=pid), "it was started again")
        cluster.wait_idle()
