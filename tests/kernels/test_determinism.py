"""A row has the same bits in every batch: the promise of `deterministic`, checked on whole models and on each
operation.
"""

import random

import pytest
import torch
from torch import Tensor

from kernels import ROW_TILE
from kernels.invariant import ONE_BY_ONE, PIECES, UNIT, InvariantProducts, _in_pieces
from kernels.reference import reference_ops, silu_mul
from loopline.model import random_model
from loopline.model_spec import Family, ModelSpec
from tests.kernels.paged_batch import PagedPrompts, Piece


def small_spec(family: Family, width: int, heads: int, kv_heads: int) -> ModelSpec:
    ouro = family is Family.OURO
    return ModelSpec(
        family=family,
        hidden_size=width,
        intermediate_size=width * 2 + 36,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width // heads,
        vocab_size=331,
        num_prelude=0 if ouro else 1,
        num_recurrent=2,
        num_coda=0 if ouro else 1,
        default_loops=2,
        context_tokens=512,
        rope_base=10000.0,
        norm_eps=1e-6,
        tied_head=not ouro,
        checkpoint_dtype="fp32",
        bos_id=None,
        stop_ids=(),
    )


SPECS = {
    "ouro-64": small_spec(Family.OURO, 64, 4, 4),
    "ouro-64-grouped": small_spec(Family.OURO, 64, 4, 2),
    "ouro-160-one-kv-head": small_spec(Family.OURO, 160, 5, 1),
    "ouro-256": small_spec(Family.OURO, 256, 4, 4),
    "huginn-64": small_spec(Family.HUGINN, 64, 4, 4),
    "huginn-160": small_spec(Family.HUGINN, 160, 5, 5),
    "huginn-256": small_spec(Family.HUGINN, 256, 4, 4),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def random_schedule(rng: random.Random, lengths: list[int], most_rows: int) -> list[list[Piece]]:
    """Batches that compute every position of every prompt, in order within a prompt, cut and mixed at random."""
    done = [0] * len(lengths)
    batches = []
    while any(have < length for have, length in zip(done, lengths, strict=True)):
        waiting = [index for index, length in enumerate(lengths) if done[index] < length]
        batch = []
        for index in rng.sample(waiting, rng.randint(1, len(waiting))):
            count = min(rng.choice((1, 1, 2, 7, 8, 13, 40, most_rows)), lengths[index] - done[index])
            batch.append(Piece(index, done[index], count))
            done[index] += count
        batches.append(batch)
    return batches


def run_schedule(paged: PagedPrompts, batches: list[list[Piece]]) -> list[Tensor]:
    """Logits [S, V] of every prompt."""
    parts: list[list[Tensor]] = [[] for _ in paged.prompts]
    for batch in batches:
        for piece, logits in zip(batch, paged.run(batch), strict=True):
            parts[piece.prompt].append(logits)
    return [torch.cat(part) for part in parts]


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "fp32") for name in SPECS), ("ouro-64-grouped", "bf16"), ("huginn-160", "bf16")]
)
def test_bits_do_not_depend_on_batch_or_chunking(name: str, dtype: str) -> None:
    rng = random.Random(name)
    model = random_model(SPECS[name], dtype=dtype, seed=1)
    lengths = [1, 3, 9, 70, 150]
    prompts = [[rng.randrange(331) for _ in range(length)] for length in lengths]
    noise = [torch.randn(length, model.spec.hidden_size).to(model.dtype) for length in lengths]

    def logits(batches: list[list[Piece]], block_size: int, seed: int) -> list[Tensor]:
        paged = PagedPrompts(model, prompts, loops=2, block_size=block_size, seed=seed)
        paged.noise = noise
        return run_schedule(paged, batches)

    alone = logits([[Piece(index, 0, length)] for index, length in enumerate(lengths)], 16, 0)
    for expected, prompt, state in zip(alone, prompts, noise, strict=True):
        dense = model.prompt_logits(prompt, loops=2, initial_state=state)
        assert torch.isfinite(expected).all()
        assert torch.allclose(expected, dense, atol=2e-4 if dtype == "fp32" else 0.5)
    for seed in range(3):
        got = logits(random_schedule(rng, lengths, 150), rng.choice((8, 16, 32)), seed)
        for a, b in zip(got, alone, strict=True):
            assert torch.equal(a, b)


def test_a_decode_row_alone_has_the_bits_of_prefill() -> None:
    model = random_model(SPECS["ouro-64"], seed=2)
    prompt = [token * 7 % 331 for token in range(80)]
    (at_once,) = run_schedule(PagedPrompts(model, [prompt], loops=2), [[Piece(0, 0, 80)]])
    (one_by_one,) = run_schedule(PagedPrompts(model, [prompt], loops=2), [[Piece(0, p, 1)] for p in range(80)])
    assert torch.equal(at_once, one_by_one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_in", "num_out"), [(64, 192), (160, 96), (256, 1408), (704, 256), (2048, 128), (64, 8000)]
)
def test_linear_rows_keep_their_bits(num_in: int, num_out: int, dtype: torch.dtype) -> None:
    ops = reference_ops(deterministic=True)
    weight, rows = torch.randn(num_out, num_in).to(dtype), torch.randn(300, num_in).to(dtype)
    expected = ops.linear(rows, weight)
    order = torch.randperm(300)
    assert torch.equal(ops.linear(rows[order], weight), expected[order])
    for count in (1, 2, 5, ROW_TILE, 24, 56, 129):
        first = int(torch.randint(300 - count, ()))
        assert torch.equal(ops.linear(rows[first : first + count], weight), expected[first : first + count])


@pytest.mark.parametrize("features", [32, 36, 100, 33])
def test_elementwise_rows_keep_their_bits(features: int) -> None:
    ops = reference_ops(deterministic=True)
    rows, weight = torch.randn(96, 2 * features), torch.rand(2 * features)
    activated, normed = silu_mul(rows), ops.rms_norm(rows, weight, 1e-6)
    for first in range(0, 96, ROW_TILE):
        tile = rows[first : first + ROW_TILE]
        assert torch.equal(silu_mul(tile), activated[first : first + ROW_TILE])
        assert torch.equal(ops.rms_norm(tile, weight, 1e-6), normed[first : first + ROW_TILE])


def test_products_are_right_where_no_piece_keeps_bits() -> None:
    a, b = torch.randn(5, 8, 16), torch.randn(5, 16, 4)
    products = InvariantProducts()
    for product in (products.bmm, lambda a, b: products.linear(a[0], b[0].mT.contiguous())):
        product(a, b)
    products.sizes.update(dict.fromkeys(products.sizes, ONE_BY_ONE))
    products.batched_cuts.update(dict.fromkeys(products.batched_cuts, (1, ONE_BY_ONE)))
    assert torch.allclose(products.bmm(a, b), torch.bmm(a, b), atol=1e-5)
    assert torch.allclose(products.linear(a[0], b[0].mT.contiguous()), a[0] @ b[0], atol=1e-5)
    assert torch.equal(products.bmm(a, b)[2:3, 3:4], products.bmm(a[2:3, 3:4], b[2:3]))


def test_pieces_cover_every_count() -> None:
    for count in range(1, 200):
        seen: list[int] = []

        def product(a: Tensor, _: Tensor, seen: list[int] = seen) -> Tensor:
            seen.append(len(a))
            return a * 2

        rows = torch.arange(float(count)).unsqueeze(1)
        assert torch.equal(_in_pieces(product, rows, rows, PIECES), rows * 2)
        assert set(seen) <= set(PIECES)
        assert sum(seen) == count + -count % UNIT
