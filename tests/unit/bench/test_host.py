"""The host benchmark: every figure is there, both sides of a comparison do the same, and counts are exact. No times."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from typer.testing import CliRunner

from loopline.bench import naive
from loopline.bench.host import QUICK, Decoding, count_calls, measure
from loopline.bench.naive import Arm, Race
from loopline.bench.plot import plot
from loopline.cli.main import app
from loopline.errors import OperatorError
from loopline.kv.digests import BlockDigests
from loopline.kv.ledger import Ledger

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return measure(QUICK)


def test_the_report_has_every_arm_and_every_size(report: dict[str, Any]) -> None:
    assert {one["arm"] for one in report["arms"]} == set(Arm)
    assert all(one["ratio"] > 0 and one["pairs"] == QUICK.steps for one in report["arms"])
    assert [one["rows"] for one in report["steps"]] == list(QUICK.rows)
    assert [one["blocks"] for one in report["pools"]] == list(QUICK.pools)
    assert [one["waiting"] for one in report["queues"]] == list(QUICK.queues)
    assert json.loads(json.dumps(report)) == report
    assert set(report["machine"]) == {"cpu", "num_cpus", "load", "python", "date"}


def test_a_chunk_is_one_call_of_the_ledger_before_and_one_after(report: dict[str, Any]) -> None:
    assert report["chunk"]["tokens"] == QUICK.chunk_tokens
    assert report["chunk"]["ledger_calls"] == {"begin": 1, "mark": 1}


def test_a_step_calls_the_ledgers_columns_once_whatever_its_rows() -> None:
    for num_rows in (1, 40):
        counts: Counter[CodeType | None] = Counter()
        Decoding(num_rows, 8).count_step(counts)
        assert counts[Ledger.begin_rows.__code__] == counts[Ledger.mark_rows.__code__] == 1
        assert counts[Ledger.begin_run.__code__] == counts[Ledger.mark_written.__code__] == 0


def test_a_decoding_host_starts_over_before_its_answers_end() -> None:
    host = Decoding(3, 8)
    counts: Counter[CodeType | None] = Counter()
    for _ in range(30):
        assert host.step() > 0
        host.count_step(counts)
    assert counts[Ledger.begin_rows.__code__] == 30
    assert counts[Ledger.release.__code__] == 0, "an answer ended inside a measured step"


def test_calls_are_counted_and_the_profiler_is_put_back() -> None:
    def two() -> int:
        return len((one(), one()))

    def one() -> int:
        return 1

    counts: Counter[CodeType | None] = Counter()
    previous = sys.getprofile()
    assert count_calls(two, counts) == 2
    assert sys.getprofile() is previous
    assert counts == {two.__code__: 1, one.__code__: 2, None: 1}


@pytest.mark.parametrize(
    "race_of",
    [
        lambda: naive.rehash(70),
        lambda: naive.free_count(37),
        lambda: naive.rows(5, 40),
        lambda: naive.promise(5),
        lambda: naive.chunk(24),
        lambda: naive.argmax(5, 33),
        lambda: naive.sampled(6, 70),
    ],
    ids=[arm.name for arm in Arm],
)
def test_both_sides_of_a_race_give_the_same(race_of: Callable[[], Race]) -> None:
    race = race_of()
    for _ in range(41):
        assert race.naive() == race.ours()


def test_digests_hashed_again_are_those_that_were_kept() -> None:
    token_ids = list(range(70))
    kept = BlockDigests(b"root", 16)
    kept.extend(token_ids[:40])
    kept.extend(token_ids)
    assert naive.hash_again(b"root", 16, token_ids) == kept.digests


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    arguments = ["bench", "host", "--quick", "--steps", "2", "--json", str(tmp_path / "report.json")]
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "decode rows" in result.stdout and "ledger calls for 64 tokens" in result.stdout
    written = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert {one["pairs"] for one in written["arms"]} == {2}


def test_json_to_standard_output_stands_alone() -> None:
    result = RUNNER.invoke(app, ["bench", "host", "--quick", "--steps", "1", "--json", "-"])
    assert result.exit_code == 0, result.output
    assert {one["arm"] for one in json.loads(result.stdout)["arms"]} == set(Arm)


def test_a_folder_that_does_not_exist_is_named_before_anything_runs(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["bench", "host", "--quick", "--json", str(tmp_path / "no" / "report.json")])
    assert result.exit_code == 2 and "--json" in result.output


def test_a_picture_is_drawn(tmp_path: Path, report: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    plot(report, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    result = RUNNER.invoke(app, ["bench", "host", "--quick", "--plot", str(tmp_path / "x.png")])
    assert isinstance(result.exception, OperatorError) and "loopline[bench]" in str(result.exception)
