"""Chooses tokens from logits: one pass over tensors for the whole batch, whatever each request asked for.

Order: logit bias, penalties, banned stop ids; then temperature, min-p, top-k, top-p (nucleus over what top-k left);
then Gumbel-max with Philox words keyed by (request seed, position, token id). The same request, seed and logits give
the same token in any batch. Ties go to the lowest id. Log probabilities are of the raw logits.

Shape letters: S rows to choose from, V vocabulary, W vocabulary padded so that vector loops have no tail.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.philox import Purpose, random_words
from loopline.request import SamplingParams, TokenLogprob, TokenLogprobs
from loopline.sched.plan import RowRun, SampledToken, Sampling

_COLUMN_TILE = 64
_NEVER = float("-inf")


class Sampler:
    """Stateless but for the vocabulary's size and the device."""

    def __init__(self, vocab_size: int, device: str) -> None:
        self._vocab_size = vocab_size
        self._device = device

    def sample(self, logits: Tensor, runs: Sequence[RowRun]) -> tuple[SampledToken, ...]:
        """Choose one token per row of `logits` [S, V] float32; row i belongs to runs[i], which has a Sampling."""
        if not runs:
            return ()
        samplings = [_sampling(run) for run in runs]
        params = [run.params for run in runs]
        finite = torch.isfinite(logits).all(dim=1).tolist()
        logprobs = self._logprobs(logits, params)
        adjusted = self._adjust(logits, params, samplings)
        if any(one.temperature > 0 for one in params):
            adjusted = self._perturb(adjusted, params, samplings)
        chosen = adjusted.argmax(dim=1).tolist()
        return tuple(
            SampledToken(
                run.request_id,
                token_id if is_finite else None,
                logprobs[row].of(token_id) if is_finite and row in logprobs else None,
            )
            for row, (run, token_id, is_finite) in enumerate(zip(runs, chosen, finite, strict=True))
        )

    def _logprobs(self, logits: Tensor, params: Sequence[SamplingParams]) -> dict[int, "_RowLogprobs"]:
        rows = [row for row, one in enumerate(params) if one.logprobs is not None]
        if not rows:
            return {}
        values = torch.log_softmax(logits[rows], dim=1)
        return {row: _RowLogprobs(values[i], params[row].logprobs or 0) for i, row in enumerate(rows)}

    def _adjust(self, logits: Tensor, params: Sequence[SamplingParams], samplings: Sequence[Sampling]) -> Tensor:
        """Bias, penalties and banned stop ids: a new [S, V], or `logits` itself where nothing asks for a change."""
        bias = [(row, token, value) for row, one in enumerate(params) for token, value in one.logit_bias.items()]
        banned = [
            (row, token)
            for row, (one, sampling) in enumerate(zip(params, samplings, strict=True))
            if sampling.num_generated < one.min_tokens
            for token in one.stop_ids
        ]
        if any(sampling.history.prompt_ids for sampling in samplings):
            logits = self._penalise(logits, params, samplings)
        if bias:
            rows, tokens, values = zip(*bias, strict=True)
            index = (self._ids(rows), self._ids(tokens))
            logits = logits.index_put(index, self._floats(values), accumulate=True)
        if banned:
            rows, tokens = zip(*banned, strict=True)
            never = torch.tensor(_NEVER, device=self._device)
            logits = logits.index_put((self._ids(rows), self._ids(tokens)), never)
        return logits

    def _penalise(self, logits: Tensor, params: Sequence[SamplingParams], samplings: Sequence[Sampling]) -> Tensor:
        answer = self._counts([sampling.history.generated_ids for sampling in samplings])  # [S, V]
        prompt = self._counts([sampling.history.prompt_ids for sampling in samplings])
        repetition = self._column([one.repetition_penalty for one in params])
        presence = self._column([one.presence_penalty for one in params])
        frequency = self._column([one.frequency_penalty for one in params])
        seen = (answer + prompt) > 0
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, scaled, logits)
        return logits - frequency * answer - presence * (answer > 0)

    def _counts(self, histories: Sequence[Sequence[int]]) -> Tensor:
        counts = torch.zeros((len(histories), self._vocab_size), device=self._device)
        rows = [row for row, history in enumerate(histories) for _ in history]
        tokens = [token for history in histories for token in history]
        ones = torch.ones(len(tokens), device=self._device)
        return counts.index_put((self._ids(rows), self._ids(tokens)), ones, accumulate=True)

    def _perturb(self, logits: Tensor, params: Sequence[SamplingParams], samplings: Sequence[Sampling]) -> Tensor:
        """Scores [S, V] float64 whose argmax is the sample; greedy rows keep their logits."""
        greedy = torch.tensor([one.temperature == 0 for one in params], device=self._device)[:, None]
        temperature = self._column([one.temperature or 1.0 for one in params])
        scaled = _filter(logits / temperature, params, self._column)
        gumbel = self._gumbel(params, samplings)
        return torch.where(greedy, logits.double(), scaled.double() + gumbel)

    def _gumbel(self, params: Sequence[SamplingParams], samplings: Sequence[Sampling]) -> Tensor:
        """Standard Gumbel draws [S, V] float64."""
        seeds = self._ids([one.seed - 2**64 if one.seed >= 2**63 else one.seed for one in params])
        positions = self._ids([sampling.position for sampling in samplings])
        width = -(-self._vocab_size // _COLUMN_TILE) * _COLUMN_TILE
        words = random_words(seeds, positions, Purpose.SAMPLING, width)  # [S, W]
        uniform = (words.double() + 0.5) * 2.0**-32
        return -torch.log(-torch.log(uniform))[:, : self._vocab_size]

    def _ids(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _floats(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)

    def _column(self, values: Sequence[float]) -> Tensor:
        return self._floats(values)[:, None]


class _RowLogprobs:
    """Log probabilities of one row [V], read for the token that was chosen."""

    def __init__(self, values: Tensor, num_top: int) -> None:
        self._values = values
        self._num_top = num_top

    def of(self, token_id: int) -> TokenLogprobs:
        top: tuple[TokenLogprob, ...] = ()
        if self._num_top:
            order = torch.sort(self._values, descending=True, stable=True).indices[: self._num_top].tolist()
            top = tuple(TokenLogprob(candidate, self._values[candidate].item()) for candidate in order)
        return TokenLogprobs(self._values[token_id].item(), top)


def _filter(scaled: Tensor, params: Sequence[SamplingParams], column: Callable[[Sequence[float]], Tensor]) -> Tensor:
    """Drop what min-p, top-k and top-p drop, of [S, V]; rows that ask for none keep every token."""
    if any(one.min_p > 0 for one in params):
        probabilities = torch.softmax(scaled, dim=1)
        floor = column([one.min_p for one in params]) * probabilities.max(dim=1, keepdim=True).values
        scaled = scaled.masked_fill(probabilities < floor, _NEVER)
    if all(one.top_k == 0 and one.top_p == 1 for one in params):
        return scaled
    ordered, order = torch.sort(scaled, dim=1, descending=True, stable=True)  # equal values: lowest id first
    rank = torch.arange(scaled.shape[1], device=scaled.device)[None, :]
    most = column([one.top_k or scaled.shape[1] for one in params])
    ordered = ordered.masked_fill(rank >= most, _NEVER)
    probabilities = torch.softmax(ordered, dim=1)
    before = probabilities.cumsum(dim=1) - probabilities
    top_p = column([one.top_p for one in params])
    dropped = (before >= top_p) & (top_p < 1)
    dropped[:, 0] = False  # the most likely token always stays
    ordered = ordered.masked_fill(dropped, _NEVER)
    return torch.empty_like(scaled).scatter_(1, order, ordered)


def _sampling(run: RowRun) -> Sampling:
    if run.sampling is None:
        raise ValueError(f"run of request {run.request_id} has no token to choose")
    return run.sampling
