"""What the seam offers is in kernels.reference too; `test_kernel_twins` looks at the Triton modules."""

import inspect

import pytest

from kernels import reference
from kernels.ops import Ops

OPERATIONS = [name for name, value in vars(Ops).items() if inspect.isfunction(value) and not name.startswith("_")]


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_a_twin(name: str) -> None:
    twin = getattr(reference.ReferenceOps, name)
    assert list(inspect.signature(twin).parameters) == list(inspect.signature(getattr(Ops, name)).parameters)


def test_there_are_operations() -> None:
    assert len(OPERATIONS) >= 5
