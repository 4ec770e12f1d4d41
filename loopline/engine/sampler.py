"""Chooses tokens from logits: one pass over tensors for the whole batch, whatever each request asked for.

Order: logit bias, penalties, banned stop ids; then temperature, min-p, top-k, top-p (nucleus over what top-k left);
then Gumbel-max with Philox words keyed by (request seed, position, token id). The same request, seed and logits give
the same token in any batch. Ties go to the lowest id. Log probabilities are of the raw logits. An all-greedy batch is
one argmax.

What depends on the requests' parameters alone is made into tensors once and kept while the same requests decode.

Shape letters: S rows to choose from, V vocabulary, W vocabulary padded so that vector loops have no tail.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kernels.ops import Ops
from kernels.reference import gumbel
from loopline.engine.batch import ToDevice, chosen_temperature, pinned_copier, signed_seed
from loopline.engine.exit_gate import ExitLogits, exit_probabilities
from loopline.kv.block_books import IntArray
from loopline.request import SamplingParams, TokenExtras, TokenLogprob, TokenLogprobs
from loopline.sched.plan import NOT_FINITE, StepPlan, StepResult, TokenHistory

_NEVER = float("-inf")


@dataclass(frozen=True, eq=False)
class SampleRows:
    """What is asked of S rows, in the plan's order."""

    params: tuple[SamplingParams, ...]
    positions: IntArray  # [S] of the new token
    num_generated: IntArray  # [S] tokens of the answer before it
    histories: tuple[TokenHistory, ...] | None  # None: no row has penalties


@dataclass(frozen=True, eq=False)
class Logprobs:
    """Log probabilities of the P rows that ask for them, best first, K at most."""

    rows: tuple[int, ...]  # of S
    num_top: tuple[int, ...]
    chosen: Tensor  # [P] float32
    top_values: Tensor  # [P, K] float32
    top_ids: Tensor  # [P, K] int64

    def of(self, index: int) -> TokenLogprobs:
        """What row `rows[index]` asked for; the tensors are on the host."""
        count = self.num_top[index]
        ids, values = self.top_ids[index, :count].tolist(), self.top_values[index, :count].tolist()
        top = tuple(TokenLogprob(token_id, value) for token_id, value in zip(ids, values, strict=True))
        return TokenLogprobs(self.chosen[index].item(), top)


@dataclass(frozen=True, eq=False)
class Choice:
    """Tokens that were chosen and may still be on their way."""

    token_ids: Tensor  # [S] int64 on the logits' device; NOT_FINITE where a row's logits were not
    logprobs: Logprobs | None = None
    exits: tuple[ExitLogits, ...] = ()

    def on_host(self) -> "Choice":
        """The same, all but its tokens sent on their way to the host."""
        if not self.token_ids.is_cuda:
            return self
        one = self.logprobs
        if one is not None:
            one = replace(one, chosen=_sent(one.chosen), top_values=_sent(one.top_values), top_ids=_sent(one.top_ids))
        return Choice(self.token_ids, one, tuple(replace(some, logits=_sent(some.logits)) for some in self.exits))

    def result(self, step: int, token_ids: Sequence[int]) -> StepResult:
        """The step's result, everything on the host by now."""
        found: dict[int, TokenExtras] = {}
        if self.logprobs is not None:
            found = {row: TokenExtras(self.logprobs.of(index)) for index, row in enumerate(self.logprobs.rows)}
        for some in self.exits:
            for row, logits in zip(some.rows, some.logits.tolist(), strict=True):
                found[row] = replace(found.get(row, TokenExtras()), exit_probabilities=exit_probabilities(logits))
        return StepResult(step, token_ids, {row: one for row, one in found.items() if token_ids[row] != NOT_FINITE})


def _sent(tensor: Tensor) -> Tensor:
    """A copy in pinned memory of the host, there once the stream has come so far."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


class Sampler:
    """Keeps the tensors of the last batch's parameters; nothing else lives from call to call."""

    def __init__(self, vocab_size: int, device: str, ops: Ops | None = None) -> None:
        """`ops`: chooses for batches that ask for no more than a temperature, on CUDA."""
        self._vocab_size = vocab_size
        self._device = device
        self._ops = ops if device.startswith("cuda") else None
        self._to_device: ToDevice = pinned_copier(torch.device(device))
        self._known: _Parameters | None = None
        self._plain: tuple[tuple[SamplingParams, ...], bool] = ((), True)

    def sample(self, logits: Tensor, plan: StepPlan) -> StepResult:
        """Choose a token for every row of `logits` [S, V] float32, and wait for it; rows as `sample_rows(plan)`."""
        choice = self.choose(logits, sample_rows(plan))
        return choice.result(plan.step, choice.token_ids.tolist())

    def is_plain(self, rows: SampleRows) -> bool:
        """Whether temperature and seed alone say how these rows are chosen (`Ops.choose_tokens`)."""
        known, plain = self._plain
        if not _are_the_same(known, rows.params):
            plain = all(_is_plain(one) for one in rows.params)
            self._plain = (rows.params, plain)
        return plain and rows.histories is None

    def choose(self, logits: Tensor, rows: SampleRows) -> Choice:
        """Choose a token for every row of `logits` [S, V] float32. On CUDA the host waits for nothing."""
        if not rows.params:
            return Choice(torch.zeros(0, dtype=torch.int64, device=self._device))
        known = self._parameters(rows.params)
        if self._ops is not None and self.is_plain(rows):
            positions = self._to_device(rows.positions)
            return Choice(self._ops.choose_tokens(logits, known.all_temperatures, known.all_seeds, positions))
        adjusted = self._adjust(logits, rows, known)
        if known.any_random:
            adjusted = self._perturb(adjusted, rows, known)
        finite = torch.isfinite(logits).all(dim=1)
        token_ids = torch.where(finite, adjusted.argmax(dim=1), NOT_FINITE)
        return Choice(token_ids, self._logprobs(logits, token_ids, known))

    def _parameters(self, params: tuple[SamplingParams, ...]) -> "_Parameters":
        known = self._known
        if known is None or not _are_the_same(known.params, params):
            known = self._known = _Parameters.of(params, self._to_device)
        return known

    def _logprobs(self, logits: Tensor, token_ids: Tensor, known: "_Parameters") -> Logprobs | None:
        if not len(known.logprob_rows):
            return None
        rows = known.logprob_rows
        values = torch.log_softmax(logits[rows], dim=1)  # [P, V]
        chosen = values.gather(1, token_ids[rows].clamp(min=0).unsqueeze(1)).squeeze(1)
        most = max(known.num_top)
        if most:
            values, order = torch.sort(values, dim=1, descending=True, stable=True)
        else:
            order = token_ids.new_empty((len(rows), 0))
        return Logprobs(known.logprob_places, known.num_top, chosen, values[:, :most], order[:, :most])

    def _adjust(self, logits: Tensor, rows: SampleRows, known: "_Parameters") -> Tensor:
        """Bias, penalties and banned stop ids: a new [S, V], or `logits` itself where nothing asks for a change."""
        if rows.histories is not None:
            logits = self._penalise(logits, rows.histories, known)
        if known.bias is not None:
            index, values = known.bias
            logits = logits.index_put(index, values, accumulate=True)
        if known.stops is not None:
            banned = rows.num_generated[known.stops[0]] < known.min_tokens[known.stops[0]]
            if banned.any():
                where = tuple(self._to_device(column[banned]) for column in known.stops)
                logits = logits.index_put(where, logits.new_full((), _NEVER))
        return logits

    def _penalise(self, logits: Tensor, histories: Sequence[TokenHistory], known: "_Parameters") -> Tensor:
        answer = self._counts([history.generated_ids for history in histories])  # [S, V]
        prompt = self._counts([history.prompt_ids for history in histories])
        seen = (answer + prompt) > 0
        scaled = torch.where(logits > 0, logits / known.repetition, logits * known.repetition)
        logits = torch.where(seen, scaled, logits)
        return logits - known.frequency * answer - known.presence * (answer > 0)

    def _counts(self, histories: Sequence[Sequence[int]]) -> Tensor:
        counts = torch.zeros((len(histories), self._vocab_size), device=self._device)
        rows = np.repeat(np.arange(len(histories)), [len(history) for history in histories])
        tokens = np.array([token for history in histories for token in history], np.int64)
        index = (self._to_device(rows), self._to_device(tokens))
        return counts.index_put(index, torch.ones(len(tokens), device=self._device), accumulate=True)

    def _perturb(self, logits: Tensor, rows: SampleRows, known: "_Parameters") -> Tensor:
        """Scores [S, V] float64 whose argmax is the sample; greedy rows keep their logits and cost nothing more."""
        random = known.random_rows
        some = logits[random]
        scaled = _filter((some - some.max(dim=1, keepdim=True).values) / known.temperature, known)
        noise = gumbel(known.seeds, self._to_device(rows.positions)[random], self._vocab_size)
        return logits.double().index_copy(0, random, scaled.double() + noise)


def sample_rows(plan: StepPlan) -> SampleRows:
    """What a plan asks to be chosen: of each segment its decode rows, then its runs that have a Sampling."""
    params: list[SamplingParams] = []
    positions: list[IntArray] = []
    generated: list[IntArray] = []
    histories: list[TokenHistory] = []
    for segment in plan.segments:
        if segment.decode is not None:
            params += [request.params for request in segment.decode.requests]
            positions.append(segment.decode.positions + 1)
            generated.append(segment.decode.num_generated)
            histories += segment.decode.histories or [TokenHistory()] * len(segment.decode)
        chosen = [(run.params, run.sampling) for run in segment.runs if run.sampling is not None]
        params += [one for one, _ in chosen]
        positions.append(np.array([sampling.position for _, sampling in chosen], np.int64))
        generated.append(np.array([sampling.num_generated for _, sampling in chosen], np.int64))
        histories += [sampling.history for _, sampling in chosen]
    has_history = any(history.prompt_ids for history in histories)
    return SampleRows(
        tuple(params),
        np.concatenate(positions or [np.zeros(0, np.int64)]),
        np.concatenate(generated or [np.zeros(0, np.int64)]),
        tuple(histories) if has_history else None,
    )


@dataclass(frozen=True, eq=False)
class _Parameters:
    """Tensors of one batch's parameters. R of the S rows are random, and C of these cut by top-k or top-p."""

    params: tuple[SamplingParams, ...]
    logprob_rows: Tensor  # [P] int64, of S
    logprob_places: tuple[int, ...]  # the same on the host
    num_top: tuple[int, ...]  # [P]
    random_rows: Tensor  # [R] int64, of S
    temperature: Tensor  # [R, 1] float32
    seeds: Tensor  # [R] int64
    min_p: Tensor | None  # [R, 1] float32
    cut_rows: Tensor  # [C] int64, of R
    top_k: Tensor  # [C, 1] float32
    top_p: Tensor  # [C, 1] float32
    repetition: Tensor  # [S, 1] float32, like the next two
    presence: Tensor
    frequency: Tensor
    bias: tuple[tuple[Tensor, Tensor], Tensor] | None  # (rows, token ids), values
    stops: tuple[IntArray, IntArray] | None  # (rows, token ids) of rows with min_tokens
    min_tokens: IntArray  # [S]
    all_temperatures: Tensor  # [S] float32; 0: greedy
    all_seeds: Tensor  # [S] int64

    @property
    def any_random(self) -> bool:
        return len(self.random_rows) > 0

    @classmethod
    def of(cls, params: tuple[SamplingParams, ...], to_device: ToDevice) -> "_Parameters":
        def column(values: Sequence[float]) -> Tensor:
            return to_device(np.array(values, np.float32))[:, None]

        def ids(values: Sequence[int]) -> Tensor:
            return to_device(np.array(values, np.int64))

        asking = [row for row, one in enumerate(params) if one.logprobs is not None]
        random_rows = [row for row, one in enumerate(params) if chosen_temperature(one)]
        random = [params[row] for row in random_rows]
        cut_rows = [row for row, one in enumerate(random) if one.top_k or one.top_p < 1]
        bias = [(row, token, value) for row, one in enumerate(params) for token, value in one.logit_bias.items()]
        stops = [(row, token) for row, one in enumerate(params) if one.min_tokens for token in one.stop_ids]
        bias_index = (ids([row for row, _, _ in bias]), ids([token for _, token, _ in bias]))
        return cls(
            params=params,
            logprob_rows=ids(asking),
            logprob_places=tuple(asking),
            num_top=tuple(params[row].logprobs or 0 for row in asking),
            random_rows=ids(random_rows),
            temperature=column([one.temperature for one in random]),
            seeds=ids([signed_seed(one.seed) for one in random]),
            min_p=column([one.min_p for one in random]) if any(one.min_p for one in random) else None,
            cut_rows=ids(cut_rows),
            top_k=column([random[row].top_k or float("inf") for row in cut_rows]),
            top_p=column([random[row].top_p for row in cut_rows]),
            repetition=column([one.repetition_penalty for one in params]),
            presence=column([one.presence_penalty for one in params]),
            frequency=column([one.frequency_penalty for one in params]),
            bias=(bias_index, column([value for _, _, value in bias])[:, 0]) if bias else None,
            stops=(np.array([row for row, _ in stops]), np.array([token for _, token in stops])) if stops else None,
            min_tokens=np.array([one.min_tokens for one in params], np.int64),
            all_temperatures=column([chosen_temperature(one) for one in params])[:, 0],
            all_seeds=ids([signed_seed(one.seed) for one in params]),
        )


def _is_plain(params: SamplingParams) -> bool:
    cuts = params.top_k or params.top_p < 1 or params.min_p
    return not (cuts or params.logit_bias or params.logprobs is not None or (params.min_tokens and params.stop_ids))


def _are_the_same(some: tuple[SamplingParams, ...], others: tuple[SamplingParams, ...]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


def _filter(scaled: Tensor, known: _Parameters) -> Tensor:
    """Drop what min-p, top-k and top-p drop, of [R, V]; only rows that ask for a cut are sorted."""
    if known.min_p is not None:
        probabilities = torch.softmax(scaled, dim=1)
        floor = known.min_p * probabilities.max(dim=1, keepdim=True).values
        scaled = scaled.masked_fill(probabilities < floor, _NEVER)
    if not len(known.cut_rows):
        return scaled
    ordered, order = torch.sort(scaled[known.cut_rows], dim=1, descending=True, stable=True)  # ties: lowest id first
    rank = torch.arange(scaled.shape[1], device=scaled.device)[None, :]
    ordered = ordered.masked_fill(rank >= known.top_k, _NEVER)
    probabilities = torch.softmax(ordered, dim=1)
    before = probabilities.cumsum(dim=1) - probabilities
    dropped = (before >= known.top_p) & (known.top_p < 1)
    dropped[:, 0] = False  # the most likely token always stays
    cut = torch.empty_like(ordered).scatter_(1, order, ordered.masked_fill(dropped, _NEVER))
    return scaled.index_copy(0, known.cut_rows, cut)
