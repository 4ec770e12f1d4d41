"""What a launcher runs for each role can be run, and can be loaded ahead of it: a package with a `__main__`."""

from importlib.util import find_spec

import pytest

from coordinator.launcher import WORKER_MODULES
from loopline.identity import Role


@pytest.mark.parametrize("role", Role)
def test_every_role_has_a_program(role: Role) -> None:
    assert find_spec(f"{WORKER_MODULES[role]}.__main__") is not None
