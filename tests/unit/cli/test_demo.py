"""How the demo ends: the logs that its last words name are there."""

import io
import shutil

import pytest
import typer
from rich.console import Console

from loopline.cli.demo import conclude
from loopline.cli.supervise import run_folder


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
