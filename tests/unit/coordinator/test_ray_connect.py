"""Attaching to Ray where nobody is, or somebody who says nothing; Ray is `tests.support.fake_ray`."""

import asyncio
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from loopline.config import load_config
from loopline.errors import OperatorError
from tests.support.cluster import ROOT, wait_until
from tests.support.fake_ray import FakeRay, RayError, install
from tests.unit.coordinator.cluster import WAIT_S

TOKENS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
NOBODY = "127.0.0.1:1"
LAUNCH = """
import pathlib, sys, threading
import pytest
from tests.support.fake_ray import FakeRay, install

def hang():
    pathlib.Path(sys.argv[2]).touch()
    threading.Event().wait()

fake = FakeRay({})
fake.on_init = hang
install(pytest.MonkeyPatch(), fake)
from loopline.cli.main import app
app(["launch", sys.argv[1]])
"""


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    fake = FakeRay({"a": {"CPU": 2.0}})
    install(monkeypatch, fake)
    yield fake
    fake.unblocked.set()


def write(folder: Path, address: str) -> Path:
    path = folder / "cluster.yaml"
    text = f"model: {{path: somewhere}}\nlauncher: {{kind: ray, address: '{address}'}}\n"
    path.write_text(text, encoding="utf-8")
    return path


def open_and_close(folder: Path, address: str) -> None:
    path = write(folder, address)

    async def main() -> None:
        starter = importlib.import_module("coordinator.ray_starter").RayStarter(load_config(path), path)
        try:
            await starter.open()
        finally:
            await asyncio.wait_for(starter.close(), WAIT_S)

    asyncio.run(main())


def test_where_nobody_listens_ray_is_not_asked(ray: FakeRay, tmp_path: Path) -> None:
    with pytest.raises(OperatorError) as raised:
        open_and_close(tmp_path, NOBODY)
    why = f"{NOBODY} cannot be connected to: Connection refused"
    assert str(raised.value) == f"launcher.address is {NOBODY}: no Ray cluster to attach to: {why}"
    assert "init" not in ray.calls


def test_the_same_of_what_auto_finds(ray: FakeRay, tmp_path: Path) -> None:
    ray.auto = NOBODY
    with pytest.raises(OperatorError, match=f"is auto: no Ray cluster to attach to: {NOBODY} cannot be connected to"):
        open_and_close(tmp_path, "auto")
    assert "init" not in ray.calls


def test_the_cause_that_ray_names_is_said(ray: FakeRay, tmp_path: Path) -> None:
    fault = ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")
    trace = 'Traceback (most recent call last):\n  File "node.py"\n    client = Client(\n'
    fault.__cause__ = RayError(f"no GCS: {trace}InvalidAuthToken: needed\nRAY_AUTH_MODE=token")
    ray.faults["init"] = fault
    with pytest.raises(OperatorError, match=r"at 10.0.0.1:6379: no GCS: InvalidAuthToken: needed RAY_AUTH_MODE=token$"):
        open_and_close(tmp_path, "auto")


def test_one_that_listens_and_says_nothing_has_a_limit(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = importlib.import_module("coordinator.ray_calls")
    monkeypatch.setattr(calls, "_CONNECT_S", 0.1)
    monkeypatch.setattr(calls, "_GRACE_S", 0.1)
    hung = threading.Event()
    ray.on_init = hung.wait
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            pytest.raises(OperatorError, match=r"whatever is there does not take this launch in within 0.1 s"),
        ):
            open_and_close(tmp_path, f"127.0.0.1:{server.getsockname()[1]}")
    finally:
        hung.set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_ends_a_launch_that_ray_does_not_take_in(number: signal.Signals, tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    command = [sys.executable, "-c", LAUNCH, str(write(tmp_path, "auto")), str(hangs)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as process:
        try:
            wait_until(hangs.exists, "it waits for Ray", WAIT_S)
            process.send_signal(number)
            said, _ = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    assert process.returncode == 0 and "Traceback" not in said


def test_a_cluster_of_the_launch_s_own_has_a_token_that_is_no_file(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would make one in the user's home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in TOKENS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # as it was after the test, whoever sets it meanwhile
    seen: list[str | None] = []
    ray.on_init = lambda: seen.append(os.environ.get("RAY_AUTH_TOKEN"))
    open_and_close(tmp_path, "local")
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    open_and_close(tmp_path, "auto")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    open_and_close(tmp_path, "local")
    monkeypatch.delenv("RAY_AUTH_MODE")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("the user's own")
    open_and_close(tmp_path, "local")
    assert len(seen[0] or "") == 64 and seen[1:] == [None, None, None]
