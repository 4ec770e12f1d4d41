"""Whether packed prefill may stand in for per-row prefill: both compute the same prompts, their logits are compared.

Packed prefill takes many positions of a prompt through one product and one attention; per-row prefill computes each as
a decode step does. They add up in other orders, so their logits differ by rounding, and must not differ by more: a
request whose prompt one way wrote and whose tokens the other way chooses is then as good as either. Called by the
engine once, at load; nothing here knows of devices or models.

Shape letters: S positions, V vocabulary.
"""

import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

PROMPT_TOKENS = (33, 64, 130, 257)
"""Lengths just past a tile, of whole tiles, and over several, whatever power of two a kernel's tiles are."""


@dataclass(frozen=True, kw_only=True)
class GateReport:
    """How far packed logits are from per-row ones. Errors and margins are in units of the per-row logits' spread.

    An error is infinite where either way gave a number that is not finite.
    """

    num_positions: int
    max_error: float
    """Of any one logit."""
    worst_position_error: float
    """Mean of a position's errors, at the worst position."""
    mean_error: float
    flipped_margins: tuple[float, ...]
    """By how much the per-row way preferred its top token, at each position where the packed way has another."""

    @property
    def top_agreement(self) -> float:
        """Share of positions whose top token is the same both ways."""
        return 1 - len(self.flipped_margins) / self.num_positions

    def decided_disagreements(self, margin: float) -> int:
        """Positions whose top tokens differ although the per-row way preferred its own by more than `margin`."""
        return sum(flipped > margin for flipped in self.flipped_margins)


@dataclass(frozen=True, kw_only=True)
class GateBounds:
    """The most that a report may have, in its units, and the least agreement."""

    max_error: float
    worst_position_error: float
    mean_error: float
    top_agreement: float
    decided_margin: float
    """A preference beyond it is no tie: none may flip. Two logits that each err by e flip a margin of up to 2e."""


FP32_BOUNDS = GateBounds(
    max_error=2e-3, worst_position_error=6e-4, mean_error=1.5e-4, top_agreement=0.98, decided_margin=4e-3
)
BF16_BOUNDS = GateBounds(
    max_error=0.5, worst_position_error=0.15, mean_error=0.075, top_agreement=0.85, decided_margin=0.25
)


def bounds_for(dtype: torch.dtype) -> GateBounds:
    """Bounds for a model that computes in `dtype`: float32's, or bfloat16's for every other.

    They lie between what sound kernels and broken ones gave, measured in plain torch on small trained models of 24 and
    36 layer passes, and on a random Ouro of 96. Largest, worst position's and mean error:

        float32   another order of summation            3e-6 to 1e-4   2e-6 to 3e-5   5e-7 to 9e-6
                  products of TF32 inputs               2e-3 and up    1e-3 and up    3e-4 and up
        bfloat16  another order, and other roundings    0.05 to 0.27   0.03 to 0.07   0.005 to 0.04
                  a layer that misses keys or sums      0.8 and up     0.2 and up     0.004 and up

    The mean hides what is wrong at a few positions: the worst of them tells. In bfloat16 either way is as far from
    float32 as from the other, so that neither is the better one. Agreement is loose because tops are often near ties;
    the margin of a flip tells those (sound: up to 0.1) from real ones. More loops of a trained Huginn add nothing (8 to
    64 measured). A random Huginn of 32 loops is chaotic: it turns roundings into a mean error of 6e-5 in float32, which
    passes, and 0.4 in bfloat16, which no bound tells from a broken kernel.
    """
    return FP32_BOUNDS if dtype is torch.float32 else BF16_BOUNDS


def compare(packed: Tensor, per_row: Tensor) -> GateReport:
    """Report on float32 logits [S, V] of the same positions, S at least 1 and V at least 2, on one device.

    The unit is the standard deviation of all per-row logits, or 1 where that is less: flat logits decide nothing.
    Raises ValueError if the shapes differ or have no position.
    """
    if packed.shape != per_row.shape or packed.dim() != 2 or not packed.numel():
        raise ValueError(f"logits are {list(packed.shape)} packed, {list(per_row.shape)} per row; both must be [S, V]")
    spread = float(per_row.std(correction=0))
    spread = max(1.0, spread) if math.isfinite(spread) else 1.0
    errors = (packed - per_row).abs_().nan_to_num_(nan=math.inf, posinf=math.inf)  # inf - inf is no agreement either
    by_position = errors.mean(dim=1)
    best = per_row.topk(2, dim=1).values
    margins = (best[:, 0] - best[:, 1]).nan_to_num(nan=math.inf, posinf=math.inf)
    flipped = margins[packed.argmax(dim=1) != per_row.argmax(dim=1)]
    return GateReport(
        num_positions=len(packed),
        max_error=float(errors.max()) / spread,
        worst_position_error=float(by_position.max()) / spread,
        mean_error=float(by_position.mean()) / spread,
        flipped_margins=tuple(margin / spread for margin in sorted(flipped.tolist(), reverse=True)),
    )


def passes(report: GateReport, bounds: GateBounds) -> bool:
    """Whether packed prefill may be used."""
    return all(within for _, within in _findings(report, bounds))


def describe(report: GateReport, bounds: GateBounds) -> str:
    """Every number beside its bound, those out of bounds first."""
    findings = _findings(report, bounds)
    ordered = sorted(findings, key=lambda finding: finding[1])
    return f"packed against per-row logits at {report.num_positions} positions: " + "; ".join(
        text if within else f"OUT OF BOUNDS: {text}" for text, within in ordered
    )


def _findings(report: GateReport, bounds: GateBounds) -> list[tuple[str, bool]]:
    """Each number beside its bound, and whether it is within."""
    decided = report.decided_disagreements(bounds.decided_margin)
    errors = (
        ("largest error", report.max_error, bounds.max_error),
        ("error of the worst position", report.worst_position_error, bounds.worst_position_error),
        ("mean error", report.mean_error, bounds.mean_error),
    )
    agreement = f"same top token at {report.top_agreement:.4f} (at least {bounds.top_agreement:g})"
    return [
        *((f"{name} {value:.2e} (at most {most:g})", value <= most) for name, value, most in errors),
        (agreement, report.top_agreement >= bounds.top_agreement),
        (f"another top token at {decided} that were no tie (margin over {bounds.decided_margin:g}; none)", not decided),
    ]


def gate_prompts(vocab_size: int, context_tokens: int, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """Fixed pseudo-random prompts, one of each of PROMPT_TOKENS as far as the context goes.

    Random tokens are the harder case: no text that the model was trained on settles what comes next.
    """
    draw = random.Random(seed)
    lengths = dict.fromkeys(min(length, context_tokens) for length in PROMPT_TOKENS)
    return tuple(tuple(draw.randrange(vocab_size) for _ in range(length)) for length in lengths)


def choose_prefill(
    mode: str, run_packed: Callable[[], Tensor], run_per_row: Callable[[], Tensor], dtype: torch.dtype
) -> tuple[str, GateReport | None]:
    """How prompts are to be computed, "packed" or "per_row", and the report that says so.

    `mode`: one of those, taken as it is, or "auto", which alone runs anything: the same prompts both ways, float32
    logits [S, V] each, of a model that computes in `dtype`. An error that either raises is raised: a kernel that cannot
    run is no matter of accuracy. Raises ValueError for another mode.
    """
    if mode not in ("auto", "packed", "per_row"):
        raise ValueError(f"prefill is {mode!r}; allowed: auto, packed, per_row")
    if mode != "auto":
        return mode, None
    report, bounds = compare(run_packed(), run_per_row()), bounds_for(dtype)
    if passes(report, bounds):
        logger.info("prefill is packed: %s", describe(report, bounds))
        return "packed", report
    logger.warning("prefill is per row, slower: %s", describe(report, bounds))
    return "per_row", report
