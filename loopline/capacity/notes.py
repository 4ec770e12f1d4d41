"""What of a plan will not work, or not as it looks, in words; and figures for people. `loopline.capacity.plan` makes
plans, here is what it says of one.
"""

from collections.abc import Iterator

from loopline.capacity.geometry import Geometry
from loopline.capacity.hardware import Profile
from loopline.capacity.links import ONE_GPU, is_between_gpus, is_one_device, left_out
from loopline.capacity.workers import DecodePlan, PrefillPlan, TransferPlan, Workload, most_tokens, pushed
from loopline.config import ClusterConfig
from loopline.kv.arena_size import SLACK_BYTES


def figure(value: float) -> str:
    """A rate in three significant digits, or whole."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def size(num_bytes: float) -> str:
    """Bytes in the largest binary unit that they fill."""
    if num_bytes < 0:
        return f"-{size(-num_bytes)}"
    for unit, one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= one:
            return f"{num_bytes / one:,.3g} {unit}" if num_bytes / one < 100 else f"{num_bytes / one:,.0f} {unit}"
    return f"{num_bytes:,.0f} B"


def shortage(
    role: str, config: ClusterConfig, geometry: Geometry, tokens: int, group: PrefillPlan | DecodePlan
) -> Iterator[str]:
    """What a worker of this role lacks to take one request, `tokens` of which need KV there; nothing where one fits."""
    layout, arena, section = geometry.layout, group.arena, config.group(role)
    need = layout.blocks_for(tokens)
    if arena.num_blocks is None or arena.num_blocks >= need:
        return
    words = f"a {role} worker has {_blocks(arena.num_blocks)} and such a request needs {need:,}"
    if arena.left_bytes is None:
        yield f"{words}: {role}.num_blocks is too small"
        return
    need_bytes = (need + 1) * layout.block_bytes  # one takes padding's writes
    most = section.max_arena_bytes
    if most is not None and most < min(need_bytes, arena.left_bytes):
        yield f"{words}: {role}.max_arena_bytes is {most:,}, and with one more for padding they take {need_bytes:,}"
        return
    of_it = "" if section.device == "cpu" else f", less weights, workspace and {size(SLACK_BYTES)},"
    leaves = f"leaves {size(arena.left_bytes)}" if arena.left_bytes > 0 else "leaves nothing"
    yield (
        f"{words}: the memory of its device x {role}.memory_fraction {section.memory_fraction:g}{of_it} {leaves}, and "
        f"with one more for padding they take {size(need_bytes)}: {size(need_bytes - arena.left_bytes)} are missing"
    )


def _blocks(count: int) -> str:
    if count == 0:
        return "no block (it would not start)"
    return "1 block" if count == 1 else f"{count:,} blocks"


def role_notes(
    config: ClusterConfig,
    geometry: Geometry,
    prefill: PrefillPlan,
    decode: DecodePlan,
    transfer: TransferPlan,
) -> Iterator[str]:
    """Of prefill and decode workers and what is between them."""
    if config.unified.replicas:
        yield f"{config.unified.replicas} unified workers are not counted in"
    if prefill.chunk_tokens < config.prefill.chunk_tokens:
        yield (
            f"chunks are {prefill.chunk_tokens:,} tokens and not prefill.chunk_tokens: prefill.max_token_loops allows "
            f"{config.prefill.max_token_loops:,} / {geometry.loops} loops a step"
        )
    chunk_bytes, _ = pushed(
        config.worker_settings("prefill", "p", "").transfer, geometry, prefill.chunk_tokens, prefill.chunk_tokens
    )
    share = config.transfer.in_flight_limit_bytes * config.transfer.peer_share
    if chunk_bytes > share:
        yield f"a chunk's KV, {chunk_bytes:,} bytes, is more than a peer's share in flight, {int(share):,}: chunks wait"
    without = left_out(config, transfer.link)
    if without is not None:
        yield f"the link is {transfer.link}, and no push can take it: {without}"
    if is_one_device(config) and prefill.requests_per_s and decode.requests_per_s:
        shared = 1 / (1 / prefill.requests_per_s + 1 / decode.requests_per_s)
        goes = f"; KV goes by --link {ONE_GPU} then, not {transfer.link}" if is_between_gpus(transfer.link) else ""
        yield (
            f"both roles are on {config.decode.device}: where that is one GPU, its prefill and decode worker together "
            f"serve at most {figure(shared)} requests/s{goes}"
        )
        yield from _shared_memory_notes(config)


def padding_notes(role: str, decode: DecodePlan, profile: Profile) -> Iterator[str]:
    """Of a full batch that makes less than one without its last rows."""
    if decode.whole_tiles_per_s > decode.tokens_per_s:
        fewer = decode.rows - decode.rows % profile.row_tile
        yield (
            f"{decode.rows:,} rows make {figure(decode.tokens_per_s)} tokens/s and {fewer:,} would make "
            f"{figure(decode.whole_tiles_per_s)}: rows are padded to a multiple of {profile.row_tile}; "
            f"{role}.max_running: {fewer} keeps to whole ones"
        )


def prompt_shortage(
    config: ClusterConfig, geometry: Geometry, workload: Workload, prefill: PrefillPlan
) -> Iterator[str]:
    """Of a prefill worker, which keeps a prompt's KV alone."""
    yield from shortage("prefill", config, geometry, workload.prompt_tokens, prefill)


def answer_shortage(
    role: str, config: ClusterConfig, geometry: Geometry, workload: Workload, decode: DecodePlan
) -> Iterator[str]:
    """Of a worker that generates, which keeps all of a request's."""
    yield from shortage(role, config, geometry, most_tokens(workload), decode)


def _shared_memory_notes(config: ClusterConfig) -> Iterator[str]:
    asked = [one.memory_fraction for one in (config.prefill, config.decode) if one.num_blocks is None]
    if sum(asked) > 1:
        yield f"on one GPU memory_fraction, {' and '.join(f'{one:g}' for one in asked)}, is more than all of its memory"
