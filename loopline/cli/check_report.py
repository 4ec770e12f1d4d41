"""How `loopline check` shows a plan to people."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from loopline.capacity.notes import figure, size


def show(report: dict[str, Any]) -> None:
    """Print the plan: what was assumed, the model, what fits, how long steps take, how KV moves, what limits all of it.
    Where not one request fits, that comes first, and only what fits after it."""
    console = Console(highlight=False, markup=False)
    _show_shortages(console, report)
    for assumed in report["assumed"]:
        console.print(assumed)
    _show_model(console, report)
    console.print(_holding(report))
    if not report["shortages"]:
        console.print(_times(report))
        if report["transfer"] is not None:
            console.print(_links(report))
        _show_balance(console, report)
    for note in report["notes"]:
        console.print(f"note: {note}")


def _show_shortages(console: Console, report: dict[str, Any]) -> None:
    if not report["shortages"]:
        return
    workload = report["workload"]
    console.print(
        f"error: this configuration cannot serve one request of {workload['prompt_tokens']:,} prompt and "
        f"{workload['new_tokens']:,} new tokens (plan others with --prompt-tokens and --new-tokens):"
    )
    for shortage in report["shortages"]:
        console.print(f"    {shortage}")


def _show_model(console: Console, report: dict[str, Any]) -> None:
    console.print(
        f"{report['name']}: {report['model']} ({report['family']}, {report['dtype']}), {report['loops']} loops of "
        f"{report['max_loops']} at most"
    )
    if not report["checkpoint_found"]:
        console.print("    no such folder: the plan is for the public model of that name")
    console.print(
        f"context {report['context_tokens']:,} tokens; weights {size(report['weights_bytes'])}; tokenizer: "
        f"{'yes' if report['has_tokenizer'] else 'no'}"
    )
    console.print(
        f"KV: {report['num_planes']} planes, {report['token_bytes']:,} bytes a token, "
        f"{report['block_bytes']:,} bytes a block of {report['block_size']}"
    )
    if report["packing"] > 1:
        console.print(
            f"    {report['packing']:.2f}x the tokens of a layout that keeps every layer at every loop "
            f"({report['unpacked_token_bytes']:,} bytes a token)"
        )
    for role, profile in report["profiles"].items():
        if role == "prefill" or profile != report["profiles"]["prefill"]:
            of_role = "" if _is_shared(report) else f" of {role} workers"
            console.print(f"hardware{of_role}: {profile['name']} ({profile['source']})")
    workload = report["workload"]
    rate = "" if workload["rate"] is None else f", {workload['rate']:g} a second"
    console.print(f"requests of {workload['prompt_tokens']:,} prompt and {workload['new_tokens']:,} new tokens{rate}")


def _is_shared(report: dict[str, Any]) -> bool:
    return all(profile == report["profiles"]["prefill"] for profile in report["profiles"].values())


def _holding(report: dict[str, Any]) -> Table:
    table = _table("role", "workers", "device", "blocks each", "arena each", "tokens each", "requests each")
    for role, group in report["workers"].items():
        about = "about " if group["is_estimate"] else ""
        sizes = [group["num_blocks"], group["arena_bytes"], group["tokens"]]
        shown = ["by free memory"] * 3
        if None not in sizes:
            shown = [f"{about}{sizes[0]:,}", f"{about}{size(sizes[1])}", f"{about}{sizes[2]:,}"]
        table.add_row(role, str(group["replicas"]), group["device"], *shown, f"{group['fits']:,}")
    return table


def _times(report: dict[str, Any]) -> Table:
    table = _table("one worker", "floor, ms", "bound by", "expected, ms", "of it", "a second")
    prefill, decode = report["steps"]["prefill"], report["steps"]["decode"]
    prompt = f"{report['workload']['prompt_tokens']:,} tokens, chunks of {prefill['chunk_tokens']:,}"
    table.add_row(f"prefill: a prompt of {prompt}", *_time(prefill["one_prompt"]))
    table.add_row(
        f"    {prefill['prompts']:,} side by side", "", "", "", "", f"{figure(prefill['requests_per_s'])} prompts"
    )
    table.add_row("decode: a step of 1 row", *_time(decode["one_row"]))
    rows = f"{decode['rows']:,} rows ({decode['rows_limit']})"
    table.add_row(f"    {rows}", *_time(decode["full"]), f"{_tokens(decode['tokens_per_s'])} tokens")
    return table


def _links(report: dict[str, Any]) -> Table:
    transfer = report["transfer"]
    table = _table("link", "1,000 tokens, ms", "")
    for name, seconds in transfer["thousand_tokens_s"].items():
        own = name == transfer["link"]
        words = (
            f"a prompt: {size(transfer['request_bytes'])} in {transfer['pushes']} pushes, "
            f"{_ms(transfer['expected_s'])} ms (floor {_ms(transfer['floor_s'])}); "
            f"{_ms(transfer['last_chunk_s'])} ms after its last chunk"
        )
        table.add_row(name, _ms(seconds), words if own else "")
    return table


def _show_balance(console: Console, report: dict[str, Any]) -> None:
    rates = ", ".join(f"{part} {figure(rate)}" for part, rate in report["rates"].items())
    console.print(f"requests/s of all workers: {rates}")
    console.print(f"bottleneck: {report['bottleneck']}, {figure(report['requests_per_s'])} requests/s")
    if report["ratio"] is not None:
        prefill, decode = report["ratio"]
        console.print(
            f"balanced at about {prefill} prefill to {decode} decode workers "
            f"({report['prefill_per_decode']:.3g} prefill workers keep one decode worker busy)"
        )
    if report["split"] is not None:
        console.print(_split(report))
    demand = report["demand"]
    if demand is None:
        return
    role = "unified" if "unified" in report["rates"] else "decode"
    need = [demand[key] for key in ("prefill_workers", "decode_workers")]
    words = ["no number of" if count is None else f"{count:,}" for count in need]
    if role == "unified":
        console.print(f"the rate needs {words[0]} unified workers")
    else:
        console.print(f"the rate needs {words[0]} prefill and {words[1]} decode workers")
    used = ", ".join(f"{part} {'-' if use is None else f'{use:.0%}'}" for part, use in demand["use"].items())
    console.print(f"used: {used}")
    if demand["rows"] is None:
        console.print(f"more answers come than {role} workers make")
    else:
        console.print(
            f"{demand['rows']:.3g} answers at once in each {role} worker, {_ms(demand['token_s'])} ms a token"
        )


def _split(report: dict[str, Any]) -> str:
    split, workers = report["split"], report["workers"]
    own = (workers["prefill"]["replicas"], workers["decode"]["replicas"])
    best, count = (split["prefill"], split["decode"]), split["prefill"] + split["decode"]
    words = f"{best[0]:,} prefill and {best[1]:,} decode, {figure(split['requests_per_s'])} requests/s"
    if best == own:
        return f"best split of {count:,} workers: {words}, as in the file"
    if count != sum(own):
        return f"best split of {count:,} workers: {words}"
    return (
        f"best split of {count:,} workers: {words}; the file has {own[0]:,} and {own[1]:,}, "
        f"{figure(report['requests_per_s'])} requests/s"
    )


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _time(time: dict[str, Any]) -> Sequence[str]:
    part = time["floor_s"] / time["expected_s"]
    return [_ms(time["floor_s"]), time["bound"], _ms(time["expected_s"]), f"{part:.0%}"]


def _tokens(rate: float) -> str:
    """Tokens a second: whole, or of few two digits."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"
