"""The command line of a worker."""

import os
import socket
from pathlib import Path

import pytest

from loopline.worker.main import parse_worker_arguments
from loopline.worker.runtime import EXIT_OPERATOR
from tests.support.golden import MODELS


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"model: {{path: {MODELS / 'tiny-ouro'}}}\n", encoding="utf-8")
    return str(path)


def test_a_name_that_no_launched_worker_has(config: str) -> None:
    parsed = parse_worker_arguments("decode", ["--config", config, "--coordinator", "127.0.0.1:1"])
    assert parsed.settings.name == f"decode-{socket.gethostname()}-{os.getpid()}"


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
@pytest.mark.parametrize("value", ["70000", "-1", "http"])
def test_what_is_no_port_is_named(config: str, flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_worker_arguments("decode", ["--config", config, "--coordinator", "127.0.0.1:1", f"{flag}={value}"])
    assert ended.value.code == EXIT_OPERATOR
    assert f"argument {flag}: {value} is not a port; allowed: 0 (any free one) to 65535" in capsys.readouterr().err


def test_a_given_name_is_kept(config: str) -> None:
    parsed = parse_worker_arguments("decode", ["--config", config, "--coordinator", "127.0.0.1:1", "--name", "mine"])
    assert (parsed.settings.name, parsed.settings.coordinator) == ("mine", "127.0.0.1:1")
