"""The installed NIXL takes what we give it, and a process that used it ends as it would without it."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("how_far", "status"), [("import", 0), ("agent", 0), ("registered", 0), ("closed", 0), ("raising", 7)]
)
def test_a_process_with_nixl_ends_with_its_own_status(how_far: str, status: int) -> None:
    """Also one that leaves without closing its agent, as an error may make it."""
    command = [sys.executable, str(Path(__file__).with_name("nixl_exit.py")), how_far]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment, cwd=ROOT)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr and "Segmentation" not in done.stderr, done.stderr


def test_the_parameters_that_we_use_are_there() -> None:
    """Named one by one, because versions of NIXL have added and dropped some."""
    from nixl._api import nixl_agent, nixl_agent_config

    uses: dict[object, set[str]] = {
        nixl_agent_config: {"enable_prog_thread", "backends"},
        nixl_agent.register_memory: {"backends"},
    }
    for function, names in uses.items():
        assert names <= set(inspect.signature(function).parameters), function  # type: ignore[arg-type]
    methods = (
        *("create_backend", "get_agent_metadata", "add_remote_agent", "remove_remote_agent", "get_xfer_descs"),
        *("initialize_xfer", "transfer", "check_xfer_state", "release_xfer_handle", "get_new_notifs"),
        *("register_memory", "deregister_memory"),
    )
    assert [name for name in methods if not callable(getattr(nixl_agent, name, None))] == []
