"""What `load_model` and `random_model` give: dtypes, shapes, the loop driven from outside."""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from kernels import RopeStyle
from loopline.model import RopeTable, load_model, random_model, resolve_dtype
from loopline.model_spec import ModelSpec, load_model_spec
from tests.support.golden import GOLDEN, MODELS, TRAINED

OURO, HUGINN = load_model_spec(GOLDEN / "ouro_gqa_fp32"), load_model_spec(GOLDEN / "huginn_fp32")
PROMPT = [7, 3, 250, 11, 0, 9]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, torch.bfloat16),
        ("auto", torch.bfloat16),
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        (torch.float32, torch.float32),
    ],
)
def test_dtype(asked: torch.dtype | str | None, expected: torch.dtype) -> None:
    model = load_model(GOLDEN / "huginn_bf16", dtype=asked)
    assert model.dtype is expected
    assert model.device.type == "cpu"
    logits = model.prompt_logits(PROMPT)
    assert (logits.dtype, tuple(logits.shape)) == (torch.float32, (len(PROMPT), 256))


def test_an_unknown_dtype_name_says_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="'fp8'; allowed: auto, fp32, bf16"):
        resolve_dtype("fp8", OURO)


@pytest.mark.parametrize("name", TRAINED)
def test_trained_checkpoints_load_in_their_own_dtype(name: str) -> None:
    model = load_model(MODELS / name)
    assert model.dtype is torch.bfloat16
    assert torch.isfinite(model.prompt_logits(PROMPT)).all()


@pytest.mark.parametrize("spec", [OURO, HUGINN], ids=["ouro", "huginn"])
def test_random_models_are_seeded_and_stay_finite(spec: ModelSpec) -> None:
    first, again, other = (random_model(spec, seed=seed).prompt_logits(PROMPT, loops=16) for seed in (1, 1, 2))
    assert torch.isfinite(first).all()
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_models_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        random_model(OURO).spec = HUGINN  # type: ignore[misc]


def test_deterministic_and_plain_agree() -> None:
    for spec in (OURO, HUGINN):
        exact, plain = (random_model(spec, deterministic=choice).prompt_logits(PROMPT) for choice in (True, False))
        assert torch.allclose(exact, plain, atol=1e-4)


def test_huginn_starts_from_noise_or_zeros_and_ouro_from_its_embedding() -> None:
    huginn, ouro = random_model(HUGINN), random_model(OURO)
    assert (huginn.uses_initial_state, ouro.uses_initial_state) == (True, False)
    e, noise = torch.randn(4, 64), torch.randn(4, 64)
    assert torch.equal(huginn.first_state(e, noise), noise)
    assert torch.equal(huginn.first_state(e, None), torch.zeros(4, 64))
    assert torch.equal(ouro.first_state(e, None), e)
    zeros = huginn.prompt_logits(PROMPT, initial_state=torch.zeros(len(PROMPT), 64))
    assert torch.equal(huginn.prompt_logits(PROMPT), zeros)


def test_rope_table_covers_the_context_in_float32() -> None:
    spec = replace(OURO, context_tokens=40, rope_base=100.0)
    table = RopeTable.build(spec, torch.device("cpu"))
    assert table.style is RopeStyle.HALF_SPLIT
    assert tuple(table.cos.shape) == (40, spec.head_dim // 2)
    cos, sin = table.rows(torch.tensor([3, 39]))
    angle = 39 * 100.0 ** (-2 * 1 / spec.head_dim)
    assert cos.dtype is torch.float32
    assert cos[1, 1].item() == pytest.approx(torch.tensor(angle).cos().item(), abs=1e-5)
    assert sin[1, 1].item() == pytest.approx(torch.tensor(angle).sin().item(), abs=1e-5)
    assert RopeTable.build(HUGINN, torch.device("cpu")).style is RopeStyle.ADJACENT_PAIRS
