"""Command lines: what they accept, and what they answer without a cluster."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from loopline.cli.main import app, main
from loopline.cli.options import request_options
from loopline.cli.status import audit_faults, details
from loopline.cli.waiting import has_successor, is_settled, wait_for
from loopline.client import ClusterStatus, LinkInfo, WorkerInfo
from loopline.client.operator import Operator
from loopline.client.records import LaunchedWorker, LauncherInfo
from loopline.errors import CheckpointError, DeadlineExceeded
from loopline.identity import BlockCounts, BudgetCounts
from loopline.intake import Chat, RequestOptions
from loopline.request import InitialState

ROOT = Path(__file__).parents[3]
RUNNER = CliRunner()


def test_options_become_one_record() -> None:
    options = request_options(
        prompt_ids="1, 2,3",
        stop=["a", "b"],
        stop_token_ids="4",
        logit_bias=["7=-1.5", "8=2"],
        seed=2**64 - 1,
        initial_state=InitialState.ZEROS,
    )
    assert options == RequestOptions(
        prompt=(1, 2, 3),
        stop=("a", "b"),
        stop_token_ids=(4,),
        logit_bias={7: -1.5, 8: 2.0},
        seed=2**64 - 1,
        initial_state=InitialState.ZEROS,
    )
    assert request_options(prompt="hi", chat=True).prompt == Chat((("user", "hi"),))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "either --prompt"),
        ({"prompt": "x", "prompt_ids": "1"}, "either --prompt"),
        ({"prompt_ids": "1", "chat": True}, "either --prompt"),
        ({"prompt_ids": "1,x"}, "--prompt-ids is '1,x'"),
        ({"prompt": "x", "logit_bias": ["7"]}, "--logit-bias is '7'"),
    ],
)
def test_an_option_that_cannot_be_read_is_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(typer.BadParameter, match=words):
        request_options(**values)


@pytest.mark.parametrize("command", ["launch", "generate", "run", "status", "check", "worker", "demo"])
def test_every_command_has_help(command: str) -> None:
    result = RUNNER.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_a_plan_of_a_shipped_configuration() -> None:
    result = RUNNER.invoke(app, ["check", str(ROOT / "configs/local-cpu.yaml"), "--json"])
    assert result.exit_code == 0
    plan = json.loads(result.output)
    assert (plan["num_planes"], plan["token_bytes"], plan["block_bytes"]) == (24, 49_152, 786_432)
    assert plan["workers"]["decode"]["tokens"] == 16 * plan["workers"]["decode"]["num_blocks"]
    shown = RUNNER.invoke(app, ["check", str(ROOT / "configs/local-cpu.yaml"), "--rate", "1"]).output
    assert "blocks" in shown and "bottleneck: " in shown and "a token" in shown


def test_a_plan_takes_hardware_and_workload_from_the_command_line() -> None:
    data = ROOT / "tests/data/capacity"
    arguments = [
        "check",
        str(ROOT / "configs/gpu-ouro-1.4b.yaml"),
        "--json",
        "--prompt-tokens",
        "2048",
        "--new-tokens",
        "64",
    ]
    arguments += ["--profile", "gh200-144", "--profile", str(data / "h200-ouro-1.4b.json")]
    arguments += ["--profile", str(data / "h200-nvlink.json"), "--rate", "3"]
    plan = json.loads(RUNNER.invoke(app, arguments).output)
    assert plan["workload"] == {"prompt_tokens": 2048, "new_tokens": 64, "rate": 3.0}
    assert plan["profiles"]["decode"]["name"] == "measured on NVIDIA H200" and not plan["checkpoint_found"]
    assert plan["transfer"]["link"] == "measured" and plan["demand"]["prefill_workers"] == 1
    assert plan["transfer"]["request_bytes"] == 2048 * 786_432


def test_a_folder_that_is_neither_there_nor_known_is_an_error(tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text("model: {path: nowhere}\n", encoding="utf-8")
    result = RUNNER.invoke(app, ["check", str(config)])
    assert isinstance(result.exception, CheckpointError) and "nowhere" in str(result.exception)


def test_check_says_what_has_no_effect(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"model: {{path: {ROOT / 'configs/models/tiny-ouro'}, noise_key: position}}\n", encoding="utf-8")
    (note,) = json.loads(RUNNER.invoke(app, ["check", str(file), "--json"]).output)["notes"]
    assert note.startswith("model.noise_key is position, which has no effect")
    assert f"note: {note[:60]}" in RUNNER.invoke(app, ["check", str(file)]).output
    shipped = str(ROOT / "configs/local-cpu.yaml")
    assert "note:" not in RUNNER.invoke(app, ["check", shipped]).output


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            "launcher: {kind: ray}\ndecode: {device: 'cuda:1'}",
            "decode.device is cuda:1; allowed with launcher.kind: ray",
        ),
        ("launcher: {kind: ray, decode_resources: {CPU: 4}}", "launcher.decode_resources.CPU is 4; allowed: custom"),
        (
            "launcher: {kind: ray, address: local, prefill_labels: {pool: a}}",
            "launcher.prefill_labels is {'pool': 'a'}; allowed with launcher.address: local: none",
        ),
    ],
)
def test_check_refuses_what_a_launch_by_ray_does(keys: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"model: {{path: {ROOT / 'configs/models/tiny-ouro'}}}\n{keys}\n", encoding="utf-8")
    assert str(RUNNER.invoke(app, ["check", str(file)]).exception).startswith(expected)


def test_check_refuses_to_share_prefixes_of_noise_that_is_each_requests_own(tmp_path: Path) -> None:
    file, model = tmp_path / "cluster.yaml", ROOT / "configs/models/tiny-huginn"
    file.write_text(f"model: {{path: {model}}}\nkv: {{prefix_cache: true}}\n", encoding="utf-8")
    fault = str(RUNNER.invoke(app, ["check", str(file)]).exception)
    assert "kv.prefix_cache is true and model.noise_key is request" in fault
    file.write_text(f"model: {{path: {model}, noise_key: position}}\nkv: {{prefix_cache: true}}\n", encoding="utf-8")
    assert RUNNER.invoke(app, ["check", str(file)]).exit_code == 0


def test_an_error_is_one_line_and_a_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["loopline", "check", str(tmp_path / "none.yaml")])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'none.yaml'}: no such file\n"


def worker(name: str, blocks: BlockCounts, **more: Any) -> WorkerInfo:
    values: dict[str, Any] = {"role": "decode", "state": "ready", "pid": 1, "address": "", "uuid": "", "epoch": 1}
    values |= {
        "running": 0,
        "waiting": 0,
        "handoffs": {},
        "ignored": {},
        "step": 0,
        "heartbeat_age_s": 0.0,
        "links": (),
    }
    return WorkerInfo(name=name, blocks=blocks, **(values | more))


def test_an_audit_names_the_worker_that_does_not_add_up() -> None:
    workers = (worker("d0", BlockCounts(1, 2, 3, 4, 10)), worker("d1", BlockCounts(1, 0, 0, 0, 2)))
    status = ClusterStatus(workers=workers, queued=0, running=0, serving=True, epoch=1)
    assert audit_faults(status) == ["d1: free 1 + held 0 + cached 0 + quarantined 0 = 1, total 2"]


def test_a_status_shows_links_and_bytes_in_flight() -> None:
    links = (
        LinkInfo(peer="d0", transport="ucx:auto", bytes_per_s=2.0**30),
        LinkInfo(peer="d1", transport="ucx:tcp", bytes_per_s=2.0**20, is_slow=True),
    )
    budget = BudgetCounts(12 * 2**20, 2 * 2**30, 3, 0.31)
    prefill = worker("p0", BlockCounts(1, 0, 0, 0, 1), links=links, budget=budget, handoffs={"open": 2})
    decode = worker("d0", BlockCounts(1, 0, 0, 0, 1), ignored={"corrupted": 2, "stale": 1})
    status = ClusterStatus(workers=(prefill, decode), queued=0, running=0, serving=True, epoch=1)
    assert list(details(status)) == [
        "p0 to d0: ucx:auto, 1,024 MiB/s when it was warmed up",
        "p0 to d1: ucx:tcp, 1 MiB/s when it was warmed up (SLOW: under the configured floor)",
        "p0: in flight 12 MiB of 2 GiB, waited 0.3 s, 3 pushes wait",
        "p0 handoffs: 2 open",
        "d0: 2 pushes arrived with other bytes than were sent",
    ]


def test_what_a_worker_waits_for_is_in_the_status_and_in_what_a_wait_ends_with() -> None:
    kept = (
        LaunchedWorker(name="decode-0", role="decode", leaving=False),
        LaunchedWorker(name="decode-1", role="decode", leaving=False, waits_for="it needs 1 GPU"),
    )
    launcher = LauncherInfo(place="Ray at head:1", restarts=True, prefill=0, decode=2, workers=kept)
    joined = worker("decode-0", BlockCounts(1, 0, 0, 0, 1), state="starting", waits_for="a prefill worker")
    status = ClusterStatus(workers=(joined,), queued=0, running=0, serving=True, epoch=1, launcher=launcher)
    assert list(details(status))[-2:] == ["decode-0 waits for a prefill worker", "decode-1 waits: it needs 1 GPU"]

    class Waiting(Operator):
        def status(self) -> ClusterStatus:
            return status

    with (
        Waiting("127.0.0.1:1") as operator,
        pytest.raises(
            DeadlineExceeded,
            match="decode-0 waits for a prefill worker; decode-1 waits: it needs 1 GPU; `loop",
        ),
    ):
        wait_for(operator, is_settled, "2 workers", 0.0)


def test_a_successor_is_as_ready_as_it_can_be() -> None:
    blocks = BlockCounts(1, 0, 0, 0, 1)
    before = worker("d0", blocks, role="decode", state="draining", uuid="old")
    after = worker("d0", blocks, role="decode", state="starting", uuid="new")
    other = worker("p0", blocks, role="prefill", state="ready")

    def status_of(*workers: WorkerInfo) -> ClusterStatus:
        return ClusterStatus(workers=workers, queued=0, running=0, serving=True, epoch=1)

    assert not has_successor(status_of(before), "d0", "old")
    assert has_successor(status_of(after), "d0", "old")  # nobody is there to be paired with
    assert not has_successor(status_of(after, other), "d0", "old")
