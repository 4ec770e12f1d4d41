"""`loopline check` from the command line: which hardware is taken, what comes first, and the exit status."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from loopline.cli.main import app
from loopline.errors import ConfigError

ROOT = Path(__file__).parents[3]
LINK_REPORT = ROOT / "tests/data/capacity/h200-nvlink.json"
RUNNER = CliRunner()


def _file(tmp_path: Path, **sections: Any) -> Path:
    file = tmp_path / "cluster.yaml"
    cluster = {role: {"device": "cuda"} for role in ("prefill", "decode")}
    file.write_text(yaml.safe_dump({"model": {"path": "ouro-1.4b"}, **cluster, **sections}), encoding="utf-8")
    return file


def _report(*arguments: str | Path) -> Any:
    result = RUNNER.invoke(app, ["check", *map(str, arguments), "--json"])
    assert result.exception is None, result.exception
    return json.loads(result.output)


def test_the_files_section_names_profile_and_link(tmp_path: Path) -> None:
    file = _file(tmp_path, capacity={"profile": "gh200-144", "link": "tcp"})
    report = _report(file)
    assert (report["profiles"]["decode"]["name"], report["transfer"]["link"]) == ("gh200-144", "tcp")
    assert report["assumed"] == [] and RUNNER.invoke(app, ["check", str(file)]).output.startswith("cluster: ")


def test_options_go_before_the_files_section(tmp_path: Path) -> None:
    file = _file(tmp_path, capacity={"profile": "gh200-144", "link": "tcp"})
    assert _report(file, "--profile", "h200")["profiles"]["decode"]["name"] == "h200"
    assert _report(file, "--link", "nvlink")["transfer"]["link"] == "nvlink"
    measured = _report(file, "--profile", LINK_REPORT)
    assert (measured["transfer"]["link"], measured["profiles"]["decode"]["name"]) == ("measured", "gh200-144")
    assert _report(file, "--profile", LINK_REPORT, "--link", "tcp")["transfer"]["link"] == "tcp"


def test_a_profile_of_the_files_own_is_beside_it(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text("{base: gh200-96, memory_bytes: 50000000000}\n", encoding="utf-8")
    report = _report(_file(tmp_path, capacity={"profile": "ours.yaml"}))
    assert report["profiles"]["decode"]["name"] == "ours" and len(report["assumed"]) == 1  # the link


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"profile": "abacus"}, "capacity.profile is 'abacus'; allowed: h200, gh200-96, gh200-144, cpu, or a file"),
        ({"link": "pigeon"}, "link is 'pigeon'; profile h200 has: same-gpu, nvlink"),
    ],
)
def test_what_the_section_names_and_there_is_not_is_an_error(
    tmp_path: Path, section: dict[str, str], words: str
) -> None:
    fault = RUNNER.invoke(app, ["check", str(_file(tmp_path, capacity=section))]).exception
    assert isinstance(fault, ConfigError) and words in str(fault)


def test_what_is_assumed_comes_first_with_how_to_name_another(tmp_path: Path) -> None:
    shown = " ".join(RUNNER.invoke(app, ["check", str(_file(tmp_path))]).output.split())
    assert shown.startswith(
        "profile h200 is assumed for workers on cuda; to name another (gh200-96, gh200-144, or a file): --profile, or "
        "capacity.profile in the file link same-gpu is assumed (both roles are on cuda); to name another (nvlink, "
        "infiniband, tcp): --link, or capacity.link in the file cluster: "
    )
    assert _report(ROOT / "configs/local-cpu.yaml")["assumed"] == []  # a CPU says what it is


def test_a_configuration_that_serves_nothing_is_an_error_and_says_so_first(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("{memory_bytes: 3500000000}\n", encoding="utf-8")
    arguments = ["check", str(_file(tmp_path)), "--profile", str(tmp_path / "small.yaml")]
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 1
    shown = " ".join(result.output.split())
    first = "error: this configuration cannot serve one request of 1,024 prompt and 256 new tokens"
    assert shown.startswith(first) and "3.07 GiB are missing" in shown and "bottleneck" not in shown
    as_json = RUNNER.invoke(app, [*arguments, "--json"])
    assert as_json.exit_code == 1 and len(json.loads(as_json.output)["shortages"]) == 2


def test_few_tokens_a_second_are_not_shown_as_none(tmp_path: Path) -> None:
    (tmp_path / "slow.yaml").write_text("{base: cpu, layer_pass_s: 0.3}\n", encoding="utf-8")
    arguments = ["check", str(ROOT / "configs/local-cpu.yaml"), "--profile", str(tmp_path / "slow.yaml")]
    assert "0.54 tokens" in RUNNER.invoke(app, arguments).output


def test_workers_started_by_hand_need_no_launchers_host(tmp_path: Path) -> None:
    """As docs/nodes.md has it: `launch` would refuse the file, and nobody launches it."""
    host = {"coordinator": {"host": "10.0.0.1"}}
    (note,) = (one for one in _report(_file(tmp_path, **host))["notes"] if "by hand" in one)
    assert "loopline launch would refuse the file: launcher.host is 127.0.0.1; allowed: an address" in note
    fault = RUNNER.invoke(app, ["check", str(_file(tmp_path, launcher={"kind": "local"}, **host))]).exception
    assert isinstance(fault, ConfigError) and "launcher.host is 127.0.0.1" in str(fault)


def test_a_number_of_workers_is_split() -> None:
    file = ROOT / "configs/gh200-2p2d-ouro.yaml"
    shown = " ".join(RUNNER.invoke(app, ["check", str(file)]).output.split())
    assert "best split of 4 workers: 1 prefill and 3 decode, 31.7 requests/s; the file has 2 and 2, 21.1" in shown
    assert _report(file, "--workers", "12")["split"]["decode"] == 10


def test_a_report_of_another_device_or_model_is_noted(tmp_path: Path) -> None:
    report = json.loads((ROOT / "tests/data/capacity/h200-huginn-0125.json").read_text(encoding="utf-8"))
    report["machine"]["device"] = "x86_64"
    (tmp_path / "other.json").write_text(json.dumps(report), encoding="utf-8")
    notes = " ".join(_report(_file(tmp_path), "--profile", tmp_path / "other.json")["notes"])
    assert "the report is of a device x86_64, and workers are on cuda" in notes
    assert "the report is of huginn-0125 and not of this model" in notes
    own = ROOT / "tests/data/capacity/h200-ouro-1.4b.json"
    assert "the report" not in " ".join(_report(_file(tmp_path), "--profile", own)["notes"])
