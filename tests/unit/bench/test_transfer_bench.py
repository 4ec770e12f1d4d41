"""The transfer benchmark: whole runs between two processes over NIXL, what its arms are made of, and the line between
the processes. No times."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtransfer.manifest import coalesce, paired_descriptors
from loopline.bench.transfer import TransferBench, measure
from loopline.bench.transfer_arms import PushTimes, TransferArm, fragmented_blocks, fresh_blocks, part_descriptors
from loopline.bench.transfer_plot import plot_transfer
from loopline.bench.transfer_side import Channel
from loopline.errors import ConfigError, OperatorError, PeerLost, TransferError
from loopline.identity import RegionManifest

ROOT = Path(__file__).parents[3]
REGION = RegionManifest(
    base_address=1 << 20, num_blocks=20, block_bytes=96, memory_kind="DRAM", device_id=0, null_block=20
)
ARMS = ["flat", "fresh", "fragmented", "uncoalesced"]
BLOCKS, PLANES = 5, 4


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    """Of a run as UCX chooses, with the overlap, and of one over tcp with half of the planes; both at a time."""
    command = [sys.executable, "-m", "loopline.cli.bench", "transfer", "tiny", "--tokens", "70", "--rounds", "2"]
    arguments = [["--overlap", "--compute-ms", "1"], ["--transport", "tcp", "--scale", "0.5"]]
    runs = [
        subprocess.Popen(
            [*command, *more, "--json", "-"],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if not name.startswith("UCX_")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for more in arguments
    ]
    ended = [run.communicate(timeout=90) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], [errors for _, errors in ended]
    return [json.loads(output) for output, _ in ended]


@pytest.mark.parametrize(("index", "transport", "planes"), [(0, "ucx:auto", PLANES), (1, "ucx:tcp", PLANES // 2)])
def test_every_arm_moves_the_prompt_with_its_number_of_descriptors(
    reports: list[dict[str, Any]], index: int, transport: str, planes: int
) -> None:
    report = reports[index]
    model, arms = report["model"], report["arms"]
    assert report["link"]["transport"] == transport
    assert (model["blocks"], model["planes"], model["model_planes"]) == (BLOCKS, planes, PLANES)
    assert model["scaled"] == (None if planes == PLANES else f"{planes} of {PLANES} planes")
    assert list(arms) == ARMS
    assert arms["flat"]["descriptors"] == 1 and arms["fresh"]["descriptors"] <= 4
    assert arms["fragmented"]["descriptors"] == BLOCKS
    assert arms["uncoalesced"]["descriptors"] == BLOCKS * planes * 2
    for arm in arms.values():
        assert "error" not in arm and arm["checksum_ok"] and arm["rounds"] == 2
        assert arm["bytes"] == BLOCKS * model["block_bytes"]
        assert arm["prep_ms"] > 0 and 0 < arm["post_ms"] < arm["total_ms"] and arm["gb_per_s"] > 0
        assert arm["ratio"] == pytest.approx(arm["total_ms"] / arms["flat"]["total_ms"])


def test_the_overlap_moves_every_chunk(reports: list[dict[str, Any]]) -> None:
    assert reports[1]["overlap"] is None
    overlap = reports[0]["overlap"]
    assert "error" not in overlap and overlap["checksum_ok"] and overlap["compute_ms"] == 1
    passes = ("pushed_while_computing", "pushed_at_the_end", "one_chunk")
    assert [overlap[name]["descriptors"] for name in passes] == [8, 1, 1]
    assert all(len(overlap[name]["rounds_ms"]) == 2 and overlap[name]["ms"] > 0 for name in passes)


def test_a_report_can_be_drawn(reports: list[dict[str, Any]], tmp_path: Path) -> None:
    for number, report in enumerate(reports):
        plot_transfer(report, tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").stat().st_size > 0


def test_blocks_of_a_fresh_pool_are_one_run_and_of_a_fragmented_one_none_are_neighbours() -> None:
    assert len(coalesce(fresh_blocks(20, 7), fresh_blocks(30, 7))) == 1
    sources, targets = fragmented_blocks(20, 7, first=0), fragmented_blocks(20, 7, first=1)
    assert len(coalesce(sources, targets)) == 7 and not set(sources) & set(targets)


def test_a_descriptor_for_each_part_covers_what_one_for_a_run_does() -> None:
    blocks = (3, 4, 9)
    local, remote = paired_descriptors(REGION, REGION, coalesce(blocks, blocks))
    parts = part_descriptors(REGION, blocks, 8)
    assert len(parts) == 24 and parts.num_bytes == local.num_bytes == remote.num_bytes

    def covered(rows: Any) -> list[int]:
        return [byte for address, size, _ in rows.tolist() for byte in range(address, address + size)]

    assert covered(parts.rows) == covered(local.rows)
    assert parts.rows.dtype == np.uint64


def test_an_arm_that_failed_keeps_what_it_had() -> None:
    arm = TransferArm("one", (), (), lambda: paired_descriptors(REGION, REGION, []), 3, 5_000_000, True)
    assert "total_ms" not in arm.report()
    arm.pushes = [PushTimes(0.001, 0.002, seconds) for seconds in (0.004, 0.01, 0.005)]
    arm.error = "gone"
    report = arm.report()
    assert report["total_ms"] == 5 and report["gb_per_s"] == 1 and report["error"] == "gone"


def test_the_line_keeps_messages_whole_and_says_when_the_other_end_is_gone() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    theirs.sendall(b'{"a": 1}\n{"b"')
    assert channel.take(5.0) == [{"a": 1}]
    assert channel.take(0.0) == []
    theirs.sendall(b': 2}\n{"c": 3}\n')
    assert channel.answer({"do": "say c"}, "c") == 3
    theirs.sendall(b'{"error": "no room"}\n')
    with pytest.raises(TransferError, match="no room"):
        channel.take(5.0)
    theirs.close()
    with pytest.raises(PeerLost):
        channel.take(5.0)
    with pytest.raises(PeerLost):
        channel.answer({}, "never")
    channel.close()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: TransferBench(model="nowhere"), "ouro-1.4b"),
        (lambda: TransferBench(model="tiny", transport="rdma"), "auto, tcp"),
        (lambda: TransferBench(model="tiny", device="cuda:99"), "cpu"),
        (lambda: TransferBench(model="tiny", device="cpu,cpu,cpu"), "one or two"),
        (lambda: TransferBench(model="tiny", scale=2.0), "at most 1"),
        (lambda: TransferBench(model="tiny", tokens=0), "1 and above"),
        (lambda: TransferBench(model="huginn-0125", tokens=10**9, scale=1.0), "132 planes need"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_what_can(make: Callable[[], TransferBench], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        measure(make(), "a test")
    assert isinstance(refused.value, OperatorError)
