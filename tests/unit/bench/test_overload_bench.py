"""The overload benchmark: one short run with scripted workers, and what its figures are made of. No times."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
import yaml
from typer.testing import CliRunner

from loopline.bench.offered_load import Asked, Fate, figures, find_capacity
from loopline.bench.overload import OverloadBench, _until_idle, _write_config, measure
from loopline.bench.scripted_worker import Script, make_row, token_at
from loopline.bench.slow_reader import _read
from loopline.cli.bench_overload import _show
from loopline.cli.main import app
from loopline.config import load_config
from loopline.errors import CheckpointError, OperatorError
from loopline.identity import BlockRun, HandoffKey, WorkerId
from loopline.messages import Bind, Cancel, Granted, Reserve, Reserved, StepTokens
from loopline.wire._generated.loopline.v1 import loopline_pb2
from loopline.wire.channel import ERROR_KEY
from tests.support.secrets import SecretSet
from tests.unit.coordinator.builders import peer, request

MODEL = Path(__file__).parents[3] / "configs" / "models" / "tiny-ouro"


@pytest.fixture(scope="module")
def report() -> Any:
    bench = OverloadBench(
        model=MODEL, seconds=2.0, times=(1.0, 20.0), queue=2, slots=2, step_s=0.02, max_tokens=4, readers=2, pause_s=1.0
    )
    said: list[str] = []
    report = asyncio.run(measure(bench, "a command", said.append))
    assert any("one stops" in part for part in said)
    return json.loads(json.dumps(report))


def test_what_is_let_in_is_finished_and_the_rest_is_refused(report: Any) -> None:
    usual, much = report["arms"]
    assert usual["accepted"] + usual["refused"] == usual["offered"]
    assert much["refused"] > 0 and much["refusal_ms"]["p99"] > 0
    for arm in (usual, much):
        assert arm["accepted"] == arm["finished_in_time"] and arm["missed"] == arm["failed"] == 0, arm["failures"]
        assert arm["rss_mib"][0] > 1
    assert report["capacity_per_s"] > 0


def test_every_reader_has_all_its_tokens(report: Any) -> None:
    readers = report["readers"]
    assert readers["all_read_ms"]["p50"] > 0 and readers["one_stops_ms"]["p50"] > 0
    assert 40 <= readers["tokens_after_the_pause"][0] < 50  # of 50


def test_it_is_shown(report: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _show(report)
    shown = capsys.readouterr().out
    assert "refusals, ms" in shown and "2 readers, one stops" in shown


def test_scripted_workers_need_a_folder() -> None:
    with pytest.raises(CheckpointError, match="need a checkpoint folder"):
        asyncio.run(measure(OverloadBench(), "", lambda _: None))


def test_figures_count_from_the_moment_that_was_drawn() -> None:
    asked = [
        Asked(0.0, 0.5, 1.0, Fate.FINISHED),
        Asked(1.0, 1.0, 3.0, Fate.FINISHED),
        Asked(1.5, 1.5, 12.0, Fate.MISSED),
        Asked(2.0, 2.0, 2.25, Fate.REFUSED),
        Asked(2.5, 2.5, 2.6, Fate.FAILED, "why"),
    ]
    found = figures(asked, seconds=10.0, warm_s=2.0)
    assert (found["offered"], found["accepted"], found["refused"]) == (5, 4, 1)
    assert (found["finished_in_time"], found["missed"], found["failures"]) == (2, 1, ["why"])
    assert found["throughput_per_s"] == 1 / 8
    assert found["refusal_ms"]["p99"] == 250.0 and found["late_ms"]["most"] == 500.0


def test_a_scripted_worker_computes_what_it_was_bound_for() -> None:
    script, writer, asked = Script(WorkerId("d", 1)), peer("p"), request("r1", prompt=5, max_tokens=2)
    key = HandoffKey("r1", 1)
    assert script.obey(Reserve(key, asked, 9.0)) == [Reserved(key)]
    assert script.run_step() == []
    assert script.heartbeat(8).load.known == (key,)
    assert script.obey(Bind(key, writer)) == [Granted(key, writer.worker, 0, (BlockRun(0, 1),))]
    assert script.run_step() == [StepTokens(1, (make_row(asked, 5),))]
    assert script.run_step() == [StepTokens(2, (make_row(asked, 6),))]
    assert make_row(asked, 6).finish is not None and make_row(asked, 6).token_id == token_at(6)
    assert script.held == {}
    script.obey(Reserve(key, asked, 9.0))
    script.obey(Cancel(key, None))  # type: ignore[arg-type]
    assert script.obey(Bind(key, writer)) == []


class FailingAsker:
    """Every request of it fails at once."""

    async def ask(self, due_s: float) -> Asked:
        await asyncio.sleep(0)
        return Asked(due_s, due_s, due_s, Fate.FAILED, "UNAUTHENTICATED: no token")


def test_a_cluster_that_finishes_nothing_is_said() -> None:
    asker: Any = FailingAsker()
    with pytest.raises(OperatorError, match=r"no request finished in .*failed, UNAUTHENTICATED: no token"):
        asyncio.run(find_capacity(asker, 1, 0.01))
    assert figures([], seconds=2.0, warm_s=1.0)["offered"] == 0


def test_a_cluster_that_is_never_idle_is_said() -> None:
    class Busy:
        async def status(self) -> Any:
            return SimpleNamespace(queued=3, running=2)

    cluster: Any = Busy()
    with pytest.raises(OperatorError, match="3 requests wait and 2 run"):
        asyncio.run(_until_idle(cluster, 0.01))


def test_a_launched_configuration_keeps_its_files(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    secrets = SecretSet(tmp_path / "set")
    section = yaml.safe_load(yaml.safe_dump(secrets.section()).replace(f"{tmp_path}/", ""))
    config = tmp_path / "c.yaml"
    config.write_text(yaml.safe_dump({"model": {"path": "m"}, "security": section}), encoding="utf-8")
    written = load_config(_write_config(OverloadBench(config=config), tmp_path / "run"))
    assert written.read_security().access.client_tokens == {"client": secrets.client_token}
    assert written.model.path == str(tmp_path / "m")


class EndedCall:
    """A stream of three tokens that ends with a status."""

    def __init__(self, name: str) -> None:
        self._left = 3
        metadata = grpc.aio.Metadata((ERROR_KEY, name))
        self._error = grpc.aio.AioRpcError(grpc.StatusCode.ABORTED, grpc.aio.Metadata(), metadata, "why")

    async def read(self) -> Any:
        if not self._left:
            raise self._error
        self._left -= 1
        return loopline_pb2.GenerateEvent(chunk={"tokens": [{"id": 5}]})


def test_a_reader_that_is_ended_for_its_pause_is_a_result() -> None:
    async def read(name: str, stops: bool) -> tuple[int, bool]:
        go_on = asyncio.Event()
        go_on.set()
        _, late, is_ended = await _read(EndedCall(name), go_on if stops else None)
        return late, is_ended

    assert asyncio.run(read("NotRead", True)) == (1, True)
    for name, stops in (("NotRead", False), ("WorkerLost", True)):
        with pytest.raises(grpc.aio.AioRpcError):
            asyncio.run(read(name, stops))


def test_files_go_with_an_address(tmp_path: Path) -> None:
    arguments = ["bench", "overload", "--address", "192.0.2.1:5", "--token-file", str(tmp_path / "token")]
    (tmp_path / "token").write_text("t" * 32, encoding="utf-8")
    assert "no token is sent to 192.0.2.1:5 without TLS" in str(CliRunner().invoke(app, arguments).exception)
