"""How links handle errors where the configuration leaves it open."""

import pytest

from kvtransfer.nixl_agent import choose_error_mode


@pytest.mark.parametrize(
    ("asked", "memory_kind", "mode"),
    [
        ("auto", "DRAM", "peer"),
        ("auto", "VRAM", "none"),
        ("peer", "VRAM", "peer"),
        ("none", "DRAM", "none"),
    ],
)
def test_the_memory_decides_unless_the_configuration_does(asked: str, memory_kind: str, mode: str) -> None:
    chosen, why = choose_error_mode(asked, memory_kind)
    assert chosen == mode
    assert why
