"""The choice of a token from each row of logits as two Triton kernels; `kernels.triton_ops` calls it.

The first finds the largest logit of every chunk of the vocabulary, from which the second takes a greedy row's token.
For other rows it scores every token, which needs the largest logit of the row, and the last program of a row to finish
looks over the chunks. On CUDA the tokens are those of the plain twin in `kernels.reference`: scores have its bits, and
ties go to the lowest id.

Shape letters: N rows, V vocabulary, K chunks of it; G groups of 4 tokens in a chunk.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch_options, let_next_start, wait_for_previous
from kernels.philox import Purpose
from kernels.state_noise import philox_words

_CHUNK = 1024
_NOT_FINITE = tl.constexpr(-1)


def choose_tokens(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """A token id [N] int64 from each row of contiguous logits [N, V] float32; -1 where a row is not finite.

    Temperature [N] float32: 0 takes the largest logit; above, Gumbel-max with the Philox words of (seed, position,
    token id), both [N] int64.
    """
    assert logits.is_contiguous()
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    grid = (num_rows, num_chunks)
    options = {"V": vocab_size, "K": num_chunks, "CHUNK": _CHUNK} | launch_options(logits.device)
    peaks = logits.new_empty(grid)
    peak_ids, best_ids = logits.new_empty(2, *grid, dtype=torch.int32).unbind()
    best = logits.new_empty(grid, dtype=torch.float64)
    num_done = logits.new_empty(num_rows, dtype=torch.int32)
    chosen = logits.new_empty(num_rows, dtype=torch.int64)
    _find_peaks_kernel[grid](logits, peaks, peak_ids, num_done, **options)
    _choose_kernel[grid](
        logits,
        temperature,
        seeds,
        positions,
        peaks,
        peak_ids,
        best,
        best_ids,
        num_done,
        chosen,
        K_BLOCK=triton.next_power_of_2(num_chunks),
        PURPOSE=int(Purpose.SAMPLING),
        # The logarithm has products that torch's compiler fuses with sums; nothing else here can be fused.
        **options | {"enable_fp_fusion": True},
    )
    return chosen


@triton.jit
def _find_peaks_kernel(
    logits_ptr,  # [N, V]
    peaks_ptr,  # [N, K] float32: the largest logit of a chunk
    peak_ids_ptr,  # [N, K] int32: the lowest token that has it, or _NOT_FINITE
    num_done_ptr,  # [N] int32, zero afterwards
    V: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    pdl: tl.constexpr,
):
    """A program looks at one chunk of a row."""
    let_next_start(pdl)
    wait_for_previous(pdl)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + row * V + token, mask=token < V, other=float("-inf"))
    is_finite = tl.abs(logits) < float("inf")  # NaN is not
    num_finite = tl.sum(is_finite.to(tl.int32))
    peak = tl.max(logits)
    peak_id = tl.min(tl.where(logits == peak, token, V))
    peak_id = tl.where(num_finite == min(CHUNK, V - chunk * CHUNK), peak_id, _NOT_FINITE)
    tl.store(peaks_ptr + row * K + chunk, peak)
    tl.store(peak_ids_ptr + row * K + chunk, peak_id)
    if chunk == 0:
        tl.store(num_done_ptr + row, 0)


@triton.jit
def _choose_kernel(
    logits_ptr,  # [N, V]
    temperature_ptr,  # [N]
    seeds_ptr,  # [N]
    positions_ptr,  # [N]
    peaks_ptr,  # [N, K]
    peak_ids_ptr,  # [N, K]
    best_ptr,  # [N, K] float64: the largest score of a chunk, between this kernel's programs
    best_ids_ptr,  # [N, K] int32: the lowest token that has it
    num_done_ptr,  # [N] int32: chunks of a row that are scored
    chosen_ptr,  # [N] int64
    V: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PURPOSE: tl.constexpr,
    pdl: tl.constexpr,
):
    """A program scores one chunk of a row."""
    let_next_start(pdl)
    wait_for_previous(pdl)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if (temperature > 0) | (chunk == 0):
        every = tl.arange(0, K_BLOCK)
        peaks = tl.load(peaks_ptr + row * K + every, mask=every < K, other=float("-inf"))
        peak_ids = tl.load(peak_ids_ptr + row * K + every, mask=every < K, other=V)
        is_finite = tl.min(peak_ids) > _NOT_FINITE
        peak = tl.max(peaks)
        if temperature > 0:
            seed = tl.load(seeds_ptr + row)
            position = tl.load(positions_ptr + row)
            score, token = _best_of_chunk(
                logits_ptr + row * V, peak, temperature, seed, position, chunk, V, CHUNK, PURPOSE
            )
            tl.store(best_ptr + row * K + chunk, score)
            tl.store(best_ids_ptr + row * K + chunk, token)
            tl.debug_barrier()  # the stores come before the count that announces them
            if tl.atomic_add(num_done_ptr + row, 1, sem="acq_rel", scope="gpu") == K - 1:
                scores = tl.load(best_ptr + row * K + every, mask=every < K, other=float("-inf"), cache_modifier=".cg")
                tokens = tl.load(best_ids_ptr + row * K + every, mask=every < K, other=V, cache_modifier=".cg")
                chosen = tl.min(tl.where(scores == tl.max(scores), tokens, V))
                tl.store(chosen_ptr + row, tl.where(is_finite, chosen, _NOT_FINITE).to(tl.int64))
        else:
            chosen = tl.min(tl.where(peaks == peak, peak_ids, V))
            tl.store(chosen_ptr + row, tl.where(is_finite, chosen, _NOT_FINITE).to(tl.int64))


@triton.jit
def _best_of_chunk(
    row_ptr, peak, temperature, seed, position, chunk, V: tl.constexpr, CHUNK: tl.constexpr, PURPOSE: tl.constexpr
):
    """The largest score (float64) and the lowest token that has it: `(logit - peak) / temperature`, plus Gumbel noise.

    Scored in four passes, one for each word of a Philox block, so that words stay where they are made.
    """
    group = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
    words = philox_words(seed, position, group, PURPOSE)
    best = tl.full([CHUNK // 4], float("-inf"), tl.float64)
    best_token = tl.full([CHUNK // 4], V, tl.int32)
    for i in tl.static_range(4):
        token = 4 * group + i
        logits = tl.load(row_ptr + token, mask=token < V, other=float("-inf"))
        uniform = (words[i].to(tl.float64) + 0.5) * 2.0**-32
        gumbel = -tl.log(-tl.log(uniform))
        score = tl.div_rn(logits - peak, temperature).to(tl.float64) + gumbel
        is_better = score > best
        best_token = tl.where(is_better, token, best_token)
        best = tl.where(is_better, score, best)
    peak_score = tl.max(best)
    return peak_score, tl.min(tl.where(best == peak_score, best_token, V))
