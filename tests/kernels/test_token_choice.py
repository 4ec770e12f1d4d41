"""Token choice against its plain twin: the same tokens, greedy and random, with ties and rows that are not finite."""

import pytest
import torch
from torch import Tensor

from kernels import reference, token_choice

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def batch(num_rows: int, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits of which every third row is coarse, so that its largest is tied; temperatures zero, small and large."""
    generator = torch.Generator().manual_seed(num_rows * 65537 + vocab_size)
    logits = 4 * torch.randn(num_rows, vocab_size, generator=generator)
    logits[::3] = (logits[::3] / 3).round()
    temperature = torch.tensor([0.0, 1.0, 0.3, 0.0, 1e-6, 5.0])[torch.arange(num_rows) % 6]
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    positions = torch.randint(0, 2**40, (num_rows,), generator=generator)
    return logits.to(device), temperature.to(device), seeds.to(device), positions.to(device)


def check(num_rows: int, vocab_size: int, device: torch.device) -> None:
    arguments = batch(num_rows, vocab_size, device)
    mine, theirs = token_choice.choose_tokens(*arguments), reference.choose_tokens(*arguments)
    assert mine.dtype is torch.int64
    assert mine.tolist() == theirs.tolist()


def check_not_finite(device: torch.device) -> None:
    logits, temperature, seeds, positions = batch(12, 3000, device)
    for row, value in enumerate([float("nan"), float("inf"), float("-inf")] * 3):
        logits[row, 999 * (row // 3)] = value
    chosen = token_choice.choose_tokens(logits, temperature, seeds, positions).tolist()
    assert chosen[:9] == [-1] * 9
    assert chosen == reference.choose_tokens(logits, temperature, seeds, positions).tolist()


def check_ties(device: torch.device) -> None:
    """The lowest id wins within a chunk and across chunks."""
    logits = torch.zeros(5, 5000, device=device)
    for row, ids in enumerate([(4999, 17, 18), (1024, 1023), (2048, 4096), (4998, 4999), (0, 4999)]):
        logits[row, list(ids)] = 1.0
    zeros = torch.zeros(5, dtype=torch.int64, device=device)
    chosen = token_choice.choose_tokens(logits, zeros.float(), zeros, zeros)
    assert chosen.tolist() == [17, 1023, 2048, 4998, 0]


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 8), (7, 1000), (6, 1024), (13, 4099)])
def test_tokens(num_rows: int, vocab_size: int) -> None:
    check(num_rows, vocab_size, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [49152, 65536])
@pytest.mark.parametrize("num_rows", [1, 6, 33, 256])
def test_tokens_on_cuda(num_rows: int, vocab_size: int) -> None:
    check(num_rows, vocab_size, CUDA)


@pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=pytest.mark.gpu)])
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # infinity less infinity, in rows that are given up
def test_rows_that_are_not_finite(device: torch.device) -> None:
    check_not_finite(device)


@pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=pytest.mark.gpu)])
def test_ties_go_to_the_lowest_id(device: torch.device) -> None:
    check_ties(device)


@pytest.mark.gpu
def test_random_tokens_are_the_same_in_every_run() -> None:
    """The last program of a row to finish decides, whichever that is."""
    arguments = batch(256, 65536, CUDA)
    first = token_choice.choose_tokens(*arguments)
    for _ in range(50):
        assert torch.equal(token_choice.choose_tokens(*arguments), first)
