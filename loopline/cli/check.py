"""`loopline check`: is a cluster YAML right, and what will its workers hold."""

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from loopline.cli.options import Config, Json
from loopline.config import PREFIX_CACHE, ClusterConfig, load_config
from loopline.config_sections import WorkerGroup
from loopline.identity import Role
from loopline.kv.layout import KVLayout
from loopline.model_spec import load_model_spec
from loopline.noise_key import NoiseKey, check_prefix_cache
from loopline.text import load_text


def check(*, config: Config, as_json: Json = False) -> None:
    """Check a cluster YAML and its checkpoint folder, and show how much KV fits."""
    plan = make_plan(load_config(config))
    if as_json:
        sys.stdout.write(json.dumps(plan) + "\n")
        return
    console = Console(highlight=False)
    console.print(f"{plan['name']}: {plan['model']} ({plan['family']}, {plan['dtype']}), {plan['max_loops']} loops")
    console.print(f"context {plan['context_tokens']:,} tokens; tokenizer: {'yes' if plan['has_tokenizer'] else 'no'}")
    console.print(
        f"KV: {plan['num_planes']} planes, {plan['token_bytes']:,} bytes a token, "
        f"{plan['block_bytes']:,} bytes a block of {plan['block_size']}"
    )
    console.print(
        f"    {plan['packing']:.2f}x the tokens of a layout that keeps every layer at every loop "
        f"({plan['unpacked_token_bytes']:,} bytes a token)"
    )
    table = Table("role", "workers", "device", "blocks each", "arena bytes each", "tokens each")
    for role, group in plan["workers"].items():
        sizes = [group["num_blocks"], group["arena_bytes"], group["tokens"]]
        words = ["by free memory" if size is None else f"{size:,}" for size in sizes]
        table.add_row(role, str(group["replicas"]), group["device"], *words)
    console.print(table)


def make_plan(config: ClusterConfig) -> dict[str, Any]:
    """The plan as one JSON object. Raises CheckpointError where the folder cannot be served, ConfigError where not with
    these settings."""
    path = config.model.path
    spec = load_model_spec(path)
    check_prefix_cache(spec, PREFIX_CACHE[config.kv.prefix_cache], NoiseKey(config.model.noise_key))
    dtype = spec.checkpoint_dtype if config.model.dtype == "auto" else config.model.dtype
    max_loops = config.model.max_loops or spec.default_loops
    layout = KVLayout.from_spec(spec, max_loops, config.kv.block_size, dtype)
    codec = load_text(path)
    return {
        "name": config.name,
        "model": path,
        "family": str(spec.family),
        "dtype": dtype,
        "max_loops": max_loops,
        "context_tokens": spec.context_tokens,
        "has_tokenizer": codec is not None,
        "has_chat_template": codec is not None and codec.has_chat_template,
        "num_planes": layout.num_planes,
        "token_bytes": layout.token_bytes,
        "unpacked_token_bytes": layout.unpacked_token_bytes,
        "packing": layout.unpacked_token_bytes / layout.token_bytes,
        "block_size": layout.block_size,
        "block_bytes": layout.block_bytes,
        "workers": {str(role): _group_plan(config.group(role), layout) for role in Role if config.group(role).replicas},
    }


def _group_plan(group: WorkerGroup, layout: KVLayout) -> dict[str, Any]:
    """Without num_blocks the counts are known only when a worker starts: null."""
    blocks = group.num_blocks
    return {
        "replicas": group.replicas,
        "device": group.device,
        "num_blocks": blocks,
        "arena_bytes": None if blocks is None else (blocks + 1) * layout.block_bytes,  # one takes padding's writes
        "tokens": None if blocks is None else blocks * layout.block_size,
    }
