"""Where the demo runs, and how it ends: the logs that its last words name are there."""

import io
import shutil
from pathlib import Path

import pytest
import typer
from rich.console import Console

from loopline.cli.demo import Answer, conclude, demo, fault_of
from loopline.cli.supervise import run_folder
from loopline.client import Completion, Finished, Token
from loopline.errors import ConfigError
from loopline.messages import HandoffStats
from loopline.request import FinishReason, Route, Timing, Usage


def test_a_failed_demo_keeps_the_logs_that_it_names() -> None:
    said = io.StringIO()
    with pytest.raises(typer.Exit), run_folder(None) as folder:
        conclude(Console(file=said, width=200), ["request 1: gone"], folder)
    assert "failed: request 1: gone" in said.getvalue() and f"logs are in {folder}" in said.getvalue()
    assert folder.is_dir()
    shutil.rmtree(folder)


def test_a_demo_that_went_right_leaves_no_folder() -> None:
    with run_folder(None) as folder:
        conclude(Console(file=io.StringIO()), [], folder)
    assert not folder.exists()


def test_a_demo_wants_a_handoff_where_there_must_be_one() -> None:
    def fault(handoff: HandoffStats | None, expects_handoff: bool) -> str | None:
        finished = Finished(
            FinishReason.LENGTH, "", True, Usage(prompt_tokens=3, completion_tokens=1), Timing(), Route(), handoff
        )
        return fault_of(Answer(1, Completion(tokens=(Token(1, 4),), finished=finished)), expects_handoff)

    assert fault(HandoffStats(1, 1, 64, "tcp", 0.1), True) is None
    assert fault(None, False) is None
    for missing in (None, HandoffStats(0, 0, 0, "", 0.0)):
        assert fault(missing, True) == "request 1: no KV was handed over"


def test_it_runs_on_this_machine_only(tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text("model: {path: somewhere}\nlauncher: {kind: ray}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"launcher.kind is ray; allowed with `loopline demo`: local"):
        demo(config=config)
