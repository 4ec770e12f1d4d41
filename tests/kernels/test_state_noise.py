"""Position-keyed noise from the kernel and from its plain twin on a CPU, with the table that engines use: the same
float32 bits on every device, whatever rows are drawn together."""

import hashlib
import random

import pytest
import torch
from torch import Tensor

from kernels import reference, state_noise
from loopline.model.noise import quantile_table

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SEEDS = (0, 1, -1, 0x7FFFFFFF_FFFFFFFF)
POSITIONS = (0, 1, 2, 15, 16, 4095, 65_535, 2**31 - 1, 2**31, 2**33 + 5)


def drawn(source: object, seed: int, positions: list[int], like: Tensor) -> Tensor:
    device = like.device
    columns = torch.full((len(positions),), seed), torch.tensor(positions), torch.zeros(len(positions)).bool()
    on_device = [column.to(device) for column in columns]
    result: Tensor = source(*on_device, quantile_table(device), like)  # type: ignore[operator]
    return result.cpu()


def check(seed: int, positions: list[int], width: int, dtype: torch.dtype, device: torch.device) -> None:
    expected = drawn(reference.initial_state, seed, positions, torch.empty(len(positions), width, dtype=dtype))
    like = torch.empty(len(positions), width, dtype=dtype, device=device)
    assert torch.equal(drawn(state_noise.initial_state, seed, positions, like), expected)
    assert torch.equal(drawn(reference.initial_state, seed, positions, like), expected)


def test_the_table_is_the_same_on_every_machine() -> None:
    """A library that rounds a logarithm otherwise would show here, before it shows as KV that differs between hosts."""
    table = quantile_table(CPU).numpy().astype("<f4").tobytes()
    assert hashlib.sha256(table).hexdigest() == "2f85bca97e3b172a405d25a64caf980a1c020808a7125c45326bede5a082795e"


@pytest.mark.parametrize("seed", SEEDS)
def test_the_kernel_has_the_bits_of_the_twin(seed: int) -> None:
    """In the interpreter, which cuts bfloat16 off where a device rounds it: float32 alone."""
    check(seed, list(POSITIONS), 260, torch.float32, CPU)


def test_rows_may_come_in_any_order_and_number() -> None:
    whole = drawn(reference.initial_state, 3, list(POSITIONS), torch.empty(len(POSITIONS), 96))
    order = list(range(len(POSITIONS)))
    random.Random(1).shuffle(order)
    while order:
        part, order = order[:3], order[3:]
        positions = [POSITIONS[index] for index in part]
        rows = drawn(state_noise.initial_state, 3, positions, torch.empty(len(part), 96))
        assert torch.equal(rows, whole[part])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [256, 5280])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_device_has_the_bits_of_a_cpu(seed: int, width: int, dtype: torch.dtype) -> None:
    check(seed, list(POSITIONS), width, dtype, CUDA)
    check(seed, list(range(1000, 1129)), width, dtype, CUDA)
