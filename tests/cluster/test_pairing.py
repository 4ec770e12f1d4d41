"""Who is paired with whom in a running cluster: workers that compute another KV stay apart and are told why, one that
nobody could reach is not let in, and a pair is warm before it serves."""

import contextlib
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import yaml

from loopline.client import Completion
from loopline.engine.local import LocalEngine
from tests.cluster.test_tokens import BLOCK, CHUNK, prompt_of
from tests.support.asking import alone
from tests.support.checkpoints import with_other_weights
from tests.support.cluster import DEADLINE_S, LOOPLINE, READY_S, Cluster, wait_until
from tests.support.golden import MODELS

pytestmark = pytest.mark.timeout(240)


def run_folder(cluster: Cluster) -> Path:
    arguments = list(map(str, cluster.process.args))  # type: ignore[arg-type]
    return Path(arguments[arguments.index("--run-dir") + 1])


def config_of(cluster: Cluster, target: Path, section: str, **changes: object) -> Path:
    """The cluster's own YAML with some keys of one section changed."""
    raw = yaml.safe_load((run_folder(cluster).parent / "cluster.yaml").read_text(encoding="utf-8"))
    raw[section] = {**raw[section], **changes}
    target.write_text(yaml.safe_dump(raw), encoding="utf-8")
    return target


def worker_command(cluster: Cluster, config: Path, name: str, *more: str) -> list[str]:
    command = [str(LOOPLINE), "worker", "--role", "decode", "--config", str(config), "--name", name]
    return [*command, "--coordinator", cluster.address, *more]


@contextlib.contextmanager
def joining(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A worker started by hand; it drains at the end."""
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield process
        process.terminate()
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()


def test_workers_of_another_kv_take_no_part(ouro: Cluster, ouro_engine: LocalEngine, tmp_path: Path) -> None:
    """One with blocks twice as long, one whose weights differ in one number. Prompts around the block sizes of both."""
    weights = with_other_weights(MODELS / "tiny-ouro", tmp_path / "other-weights")
    longer = config_of(ouro, tmp_path / "blocks.yaml", "kv", block_size=2 * BLOCK)
    other = config_of(ouro, tmp_path / "weights.yaml", "model", path=str(weights))
    names = ("decode-longer-blocks", "decode-other-weights")
    with (
        joining(worker_command(ouro, longer, names[0])),
        joining(worker_command(ouro, other, names[1])),
    ):
        wait_until(lambda: set(names) <= ouro.workers().keys(), "both have joined", READY_S)
        lengths = (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1)
        with ThreadPoolExecutor(len(lengths)) as pool:
            answers: list[Completion] = list(
                pool.map(lambda n: ouro.client.complete(prompt_of(n), max_tokens=4, ignore_eos=True), lengths)
            )
        for length, answer in zip(lengths, answers, strict=True):
            assert answer.token_ids == alone(ouro_engine, prompt_of(length), 4)
            assert answer.finished is not None and answer.finished.route.decode == "decode-0"
        assert {ouro.workers()[name].state for name in names} == {"starting"}
        reasons = [ouro.workers()[name].waits_for for name in names]
        assert "prefill-0 differs in block_size: 32 here, 16 there" in reasons[0] and "weights: " in reasons[1]
        assert {link.peer for link in ouro.workers()["prefill-0"].links} == {"decode-0"}
        log = (run_folder(ouro) / "coordinator.log").read_text(encoding="utf-8")
        for name, field in zip(names, ("block_size: 32 here, 16 there", "weights: "), strict=True):
            said = [line for line in log.splitlines() if f"{name} starts a pairing group of its own" in line]
            assert len(said) == 1 and field in said[0]
    wait_until(lambda: not set(names) & ouro.workers().keys(), "both have left")
    ouro.wait_idle()


def test_a_worker_that_the_others_could_not_reach_is_told_so(ouro: Cluster, tmp_path: Path) -> None:
    addresses = [
        address.address
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family is socket.AF_INET and not address.address.startswith("127.")
    ]
    if not addresses:
        pytest.skip("this machine has no address but loopback")
    config = config_of(ouro, tmp_path / "same.yaml", "kv")
    command = worker_command(ouro, config, "decode-elsewhere", "--host", addresses[0])
    done = subprocess.run(command, capture_output=True, text=True, timeout=READY_S, check=False)
    assert done.returncode == 2
    assert f"{addresses[0]}:" in done.stderr and ouro.workers()["prefill-0"].address in done.stderr
    assert "decode-elsewhere" not in ouro.workers()


def test_a_pair_is_warm_before_it_serves(ouro: Cluster) -> None:
    """Transport and rate are of a transfer that both ends have seen."""
    (link,) = ouro.workers()["prefill-0"].links
    assert link.peer == "decode-0" and link.transport and link.bytes_per_s > 0


def test_a_handoff_is_as_many_descriptors_as_it_has_runs(ouro: Cluster) -> None:
    """One for each push where blocks lie together on both sides, and never more than blocks."""
    ouro.wait_idle()
    prompt = prompt_of(3 * CHUNK + 5)
    answer = ouro.client.complete(prompt, max_tokens=2)
    assert answer.finished is not None
    assert answer.finished.handoff.descriptors == answer.finished.handoff.pushes == 4
    lengths = [11 + 23 * n for n in range(12)]
    with ThreadPoolExecutor(len(lengths)) as pool:
        answers = list(pool.map(lambda n: ouro.client.complete(prompt_of(n), max_tokens=1 + n % 5), lengths))
    for length, answer in zip(lengths, answers, strict=True):
        assert answer.finished is not None
        assert answer.finished.handoff.pushes <= answer.finished.handoff.descriptors <= -(-length // BLOCK)
    ouro.wait_idle()
