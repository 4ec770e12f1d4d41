"""Options that `loopline bench session` and `loopline bench burst` share: who is asked, how often, and what is kept."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from loopline.bench.named_model import spec_of
from loopline.bench.session_arms import ALLOWED, further_settings
from loopline.cli.bench_report import check_targets
from loopline.cli.options import host_and_port, maybe_host_and_port
from loopline.errors import ConfigError

_TARGETS = "give --engine, or one or more of --address, --arm and --config"
_OF_ENGINES = (
    "random_weights",
    "device",
    "dtype",
    "prefix_cache",
    "working_set",
    "prefill",
    "host",
    "chunk_tokens",
    "step_tokens",
    "max_running",
    "count_calls",
    "set_",
)
_OF_CLUSTERS = ("deadline", "token_file", "ca_file", "cert_file", "key_file")


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
    given: Mapping[str, str]
    """The parameters of the whole command that the command line names, and the option of each."""


def _addresses(arms: list[str] | None) -> list[str] | None:
    for _, address in (_named("--arm", one) for one in arms or ()):
        host_and_port(address)
    return arms


_Arms = Annotated[
    list[str] | None,
    typer.Option("--arm", metavar="NAME=HOST:PORT", help="A running cluster; may be repeated.", callback=_addresses),
]
_Address = Annotated[
    str | None,
    typer.Option("--address", metavar="HOST:PORT", help="The same, without a name.", callback=maybe_host_and_port),
]
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
    context: typer.Context,
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
    targets, given = _targets(arm, address, config), _given(context)
    _check_who_is_asked(targets, engine, given)
    return LoadOptions(
        targets=targets,
        engine=engine,
        random_weights=random_weights,
        device=device,
        dtype=dtype,
        prefix_cache=_choices("--prefix-cache", prefix_cache, ALLOWED["prefix_cache"]),
        working_sets=_factors("--working-set", working_set),
        prefill=_choices("--prefill", prefill, ALLOWED["prefill"]),
        host=_choices("--host", host, ALLOWED["host"]),
        chunk_tokens=chunk_tokens,
        step_tokens=step_tokens,
        max_running=max_running,
        counts_calls=count_calls,
        settings=_settings(set_ or ()),
        rounds=rounds,
        ttft_limit_s=None if ttft_limit_ms is None else ttft_limit_ms / 1e3,
        tpot_limit_s=None if tpot_limit_ms is None else tpot_limit_ms / 1e3,
        deadline_s=deadline,
        json_path=json_path,
        plot_path=plot_path,
        given=given,
    )


def _targets(arms: list[str] | None, address: str | None, configs: list[str] | None) -> tuple[Target, ...]:
    targets = [Target(address, address)] if address is not None else []
    targets += [Target(name, value) for name, value in (_named("--arm", one) for one in arms or ())]
    return (*targets, *(_config(one) for one in configs or ()))


def _check_who_is_asked(targets: Sequence[Target], engine: str | None, given: Mapping[str, str]) -> None:
    if (engine is None) == (not targets):
        raise typer.BadParameter(_TARGETS)
    if engine is None:
        refuse_together("an arm that is a cluster", _OF_ENGINES, given)
        _distinct("--arm, --address and --config", [target.name for target in targets])
        return
    refuse_together("--engine", _OF_CLUSTERS, given)
    try:
        spec_of(engine)
    except ConfigError as error:
        raise typer.BadParameter(f"--engine: {error}") from None


def refuse_together(what: str, parameters: Iterable[str], given: Mapping[str, str]) -> None:
    """Raises BadParameter where one of `parameters` was given, of which none has a meaning beside `what`."""
    if options := [given[name] for name in parameters if name in given]:
        raise typer.BadParameter(f"{', '.join(options)}: without a meaning beside {what}")


def _given(context: typer.Context) -> dict[str, str]:
    named = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name and source is not None and source.name == "COMMANDLINE":
            named[parameter.name] = parameter.opts[0]
    return named


def _named(option: str, text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise typer.BadParameter(f"{option} is {text!r}; allowed: a name, =, and a value")
    return name, value


def _config(text: str) -> Target:
    name, sign, path = text.partition("=")
    return Target(name, config=Path(path)) if sign else Target(Path(text).stem, config=Path(text))


def _settings(texts: Iterable[str]) -> dict[str, str]:
    named = [_named("--set", one) for one in texts]
    _distinct("--set", [name for name, _ in named])
    try:
        further_settings(dict(named))
    except ConfigError as error:
        raise typer.BadParameter(f"--set: {error}") from None
    return dict(named)


def _choices(option: str, text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    values = tuple(text.split(","))
    for value in values:
        if value not in allowed:
            raise typer.BadParameter(f"{option} has {value!r}; allowed: {', '.join(allowed)}, with commas between")
    _distinct(option, values)
    return values


def _factors(option: str, text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{option} is {text!r}; allowed: numbers with commas between") from None
    for value in values:
        if not 0 < value < math.inf:
            raise typer.BadParameter(f"{option} has {value:g}; allowed: numbers above 0")
    _distinct(option, [f"{value:g}" for value in values])
    return values


def _distinct(option: str, names: Iterable[str]) -> None:
    seen = set()
    for name in names:
        if name in seen:
            raise typer.BadParameter(f"{option}: {name} is named twice; every arm has a name of its own")
        seen.add(name)
