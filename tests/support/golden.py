"""The reference data of tests/data/golden, and the small trained checkpoints of configs/models.

tests/data/golden/README.md says what each tensor is and how to compare with it.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

_ROOT = Path(__file__).parents[2]
GOLDEN = _ROOT / "tests" / "data" / "golden"
MODELS = _ROOT / "configs" / "models"
SMALL = GOLDEN / "ouro_fp32"
"""A checkpoint for tests of whatever may go wrong around a model. With random weights one other byte in a prompt
changes the answer (of tiny-ouro's answers it changes half), and a token costs a fraction of tiny-ouro's. It has no
tokenizer, and a context of 512."""
TRAINED = ("tiny-ouro", "tiny-huginn")
LOGIT_TOLERANCE = 1e-3  # float32
BF16_ERROR_FACTOR = 2.0  # against the reference's own bf16 error


@dataclass(frozen=True)
class GoldenCase:
    """One prompt of a set and what the public code made of it. S: prompt tokens; V: vocabulary; E: width."""

    prompt: tuple[int, ...]
    greedy: tuple[int, ...]  # ground truth: everything recomputed for every token
    logits: Tensor  # [S, V] of every prompt position, all loops
    record: dict[str, Any]  # the case's entry of cases.json
    tensors: dict[str, Tensor]  # the case's tensors of outputs.safetensors, without their prefix

    @property
    def s0(self) -> Tensor | None:
        """Huginn's initial state [S + 32, E], row p for position p; None for Ouro."""
        return self.tensors.get("s0")


@dataclass(frozen=True)
class GoldenSet:
    """One checkpoint folder with its cases."""

    name: str
    path: Path
    dtype: str  # "fp32" | "bf16"
    cases: tuple[GoldenCase, ...]


@dataclass(frozen=True)
class TrainedCase:
    """One prompt of a trained checkpoint, computed in float32; Huginn from a zero state."""

    prompt: tuple[int, ...]
    loops: int
    greedy: tuple[int, ...]
    text: str  # of `greedy`
    last_logits_top5: tuple[tuple[int, float], ...]  # of the prompt's last position
    last_logits_sum: float


def golden_sets() -> tuple[str, ...]:
    """Names of the sets, for parametrisation."""
    return tuple(sorted(path.parent.name for path in GOLDEN.glob("*/cases.json")))


@functools.cache
def load_case(name: str) -> GoldenSet:
    """One set."""
    folder = GOLDEN / name
    records = json.loads((folder / "cases.json").read_text())["cases"]
    tensors = load_file(folder / "outputs.safetensors")
    cases = []
    for index, record in enumerate(records):
        prefix = f"case{index}."
        own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        prompt, greedy = tuple(record["prompt"]), tuple(record["greedy_full"])
        cases.append(GoldenCase(prompt, greedy, own["logits"], record, own))
    return GoldenSet(name, folder, "bf16" if name.endswith("bf16") else "fp32", tuple(cases))


@functools.cache
def load_trained(name: str) -> tuple[TrainedCase, ...]:
    """What a trained checkpoint (`MODELS / name`) gives."""
    records = json.loads((GOLDEN / "trained" / f"{name}.json").read_text())["cases"]
    return tuple(
        TrainedCase(
            prompt=tuple(record["prompt_ids"]),
            loops=record["loops"],
            greedy=tuple(record["greedy"]),
            text=record["text"],
            last_logits_top5=tuple((token, logit) for token, logit in record["last_logits_top5"]),
            last_logits_sum=record["last_logits_sum"],
        )
        for record in records
    )
