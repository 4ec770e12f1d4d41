"""Options that `loopline bench session` and `loopline bench burst` share: who is asked, how often, and what is kept."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from loopline.cli.bench_report import check_targets

_TARGETS = "give --engine, or one or more of --address, --arm and --config"


@dataclass(frozen=True)
class Target:
    """An arm of the command line: a running cluster, or the file of one."""

    name: str
    address: str | None = None
    config: Path | None = None


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What the options say. `engine` None: `targets`."""

    targets: tuple[Target, ...]
    engine: str | None
    random_weights: bool
    device: str
    dtype: str
    prefix_cache: tuple[str, ...]
    working_sets: tuple[float, ...]
    prefill: tuple[str, ...]
    host: tuple[str, ...]
    chunk_tokens: int
    step_tokens: int
    max_running: int | None
    counts_calls: bool
    settings: dict[str, str]
    rounds: int
    ttft_limit_s: float | None
    tpot_limit_s: float | None
    deadline_s: float
    json_path: str | None
    plot_path: Path | None


_Arms = Annotated[
    list[str] | None, typer.Option("--arm", metavar="NAME=HOST:PORT", help="A running cluster; may be repeated.")
]
_Address = Annotated[str | None, typer.Option("--address", metavar="HOST:PORT", help="The same, without a name.")]
_Configs = Annotated[
    list[str] | None,
    typer.Option("--config", metavar="[NAME=]CONFIG", help="A cluster to launch for its turns; may be repeated."),
]
_Engine = Annotated[
    str | None, typer.Option(metavar="MODEL", help="Engines in this process: a folder, or a shape's name.")
]
_Random = Annotated[bool, typer.Option("--random-weights", help="Of the folder use config.json alone.")]
_Device = Annotated[str, typer.Option(metavar="cpu|cuda|cuda:N", help="Of engines.")]
_Dtype = Annotated[str, typer.Option(metavar="bf16|fp32|auto", help="Of engines.")]
_Cache = Annotated[str, typer.Option(metavar="on,off", help="Arms of engines: prefixes are cached or not.")]
_Sets = Annotated[str, typer.Option(metavar="X,X", help="Arms of engines: all conversations, in arenas.")]
_Prefill = Annotated[str, typer.Option(metavar="packed,per_row", help="Arms of engines: how prompts are computed.")]
_Host = Annotated[str, typer.Option(metavar="plain,naive", help="Arms of engines: how the core's host work is done.")]
_Chunk = Annotated[int, typer.Option(min=1, help="Prompt tokens of one request in one step of an engine at most.")]
_Step = Annotated[int, typer.Option(min=1, help="Prompt tokens of one step of an engine at most.")]
_Running = Annotated[int | None, typer.Option(min=1, help="Requests at once in an engine; all if not given.")]
_Calls = Annotated[
    bool, typer.Option("--count-calls", help="Also count Python calls, in a further run of each engine.")
]
_Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A further setting of engines; may be repeated.")
]
_Rounds = Annotated[int, typer.Option(min=1, help="Runs of each arm.")]
_Ttft = Annotated[float | None, typer.Option(metavar="MS", min=0, help="Good turns have their first token by then.")]
_Tpot = Annotated[float | None, typer.Option(metavar="MS", min=0, help="Good turns take no longer for a token.")]
_Deadline = Annotated[float, typer.Option(metavar="S", min=0.1, help="Of each request to a cluster.")]
_Json = Annotated[
    str | None, typer.Option("--json", metavar="PATH|-", help="Write one JSON object; - prints it alone.")
]
_Plot = Annotated[Path | None, typer.Option("--plot", metavar="PATH.png", help="Draw it (needs the extra bench).")]


def load_options(
    *,
    arm: _Arms = None,
    address: _Address = None,
    config: _Configs = None,
    engine: _Engine = None,
    random_weights: _Random = False,
    device: _Device = "cuda",
    dtype: _Dtype = "bf16",
    prefix_cache: _Cache = "on,off",
    working_set: _Sets = "0.9",
    prefill: _Prefill = "packed",
    host: _Host = "plain",
    chunk_tokens: _Chunk = 256,
    step_tokens: _Step = 2048,
    max_running: _Running = None,
    count_calls: _Calls = False,
    set_: _Set = None,
    rounds: _Rounds = 2,
    ttft_limit_ms: _Ttft = None,
    tpot_limit_ms: _Tpot = None,
    deadline: _Deadline = 600.0,
    json_path: _Json = None,
    plot_path: _Plot = None,
) -> LoadOptions:
    """The options as one record. Raises typer.BadParameter for what does not fit, OperatorError as `check_targets`."""
    check_targets(json_path, plot_path)
    targets = [Target(address, address)] if address is not None else []
    targets += [Target(name, value) for name, value in (_named("--arm", one) for one in arm or ())]
    targets += [_config(one) for one in config or ()]
    if (engine is None) == (not targets):
        raise typer.BadParameter(_TARGETS)
    return LoadOptions(
        targets=tuple(targets),
        engine=engine,
        random_weights=random_weights,
        device=device,
        dtype=dtype,
        prefix_cache=tuple(prefix_cache.split(",")),
        working_sets=_numbers("--working-set", working_set),
        prefill=tuple(prefill.split(",")),
        host=tuple(host.split(",")),
        chunk_tokens=chunk_tokens,
        step_tokens=step_tokens,
        max_running=max_running,
        counts_calls=count_calls,
        settings=dict(_named("--set", one) for one in set_ or ()),
        rounds=rounds,
        ttft_limit_s=None if ttft_limit_ms is None else ttft_limit_ms / 1e3,
        tpot_limit_s=None if tpot_limit_ms is None else tpot_limit_ms / 1e3,
        deadline_s=deadline,
        json_path=json_path,
        plot_path=plot_path,
    )


def _named(option: str, text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise typer.BadParameter(f"{option} is {text!r}; allowed: a name, =, and a value")
    return name, value


def _config(text: str) -> Target:
    name, sign, path = text.partition("=")
    return Target(name, config=Path(path)) if sign else Target(Path(text).stem, config=Path(text))


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{option} is {text!r}; allowed: numbers with commas between") from None
