"""What each worker needs of a Ray cluster's node, and on which node it is best. Pure: no Ray here."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from loopline.config import ClusterConfig
from loopline.errors import ConfigError
from loopline.identity import Role

_ROUNDING = 1e-6  # Ray counts in ten-thousandths
_NODES_SHOWN = 8
_HIDDEN = re.compile(":|_group_|memory")  # among resources: those of Ray's own accounts
Strategy: TypeAlias = Literal["pack", "spread"]


@dataclass(frozen=True)
class Need:
    """What one worker takes of its node, by Ray's names, and the labels that the node must have."""

    resources: Mapping[str, float]
    labels: Mapping[str, str]

    @property
    def num_cpus(self) -> float:
        return self.resources["CPU"]

    @property
    def num_gpus(self) -> float:
        return self.resources.get("GPU", 0)

    def describe(self) -> str:
        """For people."""
        parts = [f"{amount:g} {name}" for name, amount in self.resources.items()]
        return ", ".join(parts + [f"a node with {name}={value}" for name, value in self.labels.items()])


Placed: TypeAlias = Iterable[tuple[str, Need]]


def need_of(config: ClusterConfig, role: Role) -> Need:
    """A CPU for each of its threads, and one whole GPU where it computes on one. Raises ConfigError for a GPU with a
    number: it is Ray that gives a worker its own, which is the only one that the worker sees."""
    is_prefill = role is Role.PREFILL
    group, launcher = config.group(role), config.launcher
    custom = launcher.prefill_resources if is_prefill else launcher.decode_resources
    if group.device.startswith("cuda:"):
        raise ConfigError(f"{role.value}.device is {group.device}; allowed with launcher.kind: ray: cpu or cuda")
    labels = launcher.prefill_labels if is_prefill else launcher.decode_labels
    if labels and launcher.address == "local":
        raise ConfigError(f"launcher.{role.value}_labels is {labels}; allowed with launcher.address: local: none")
    for name in {"CPU", "GPU"} & custom.keys():
        raise ConfigError(
            f"launcher.{role.value}_resources.{name} is {custom[name]:g}; allowed: custom resources, because "
            f"{role.value}.num_threads and {role.value}.device say how many CPUs and GPUs a worker takes"
        )
    own = {"CPU": float(group.num_threads), **({"GPU": 1.0} if group.device == "cuda" else {})}
    return Need({**own, **custom}, labels)


def needs_of(config: ClusterConfig) -> dict[Role, Need]:
    """Of each role's workers. Raises ConfigError for what cannot be asked of Ray."""
    return {role: need_of(config, role) for role in Role}


def strategy_of(config: ClusterConfig, role: Role) -> Strategy:
    """How the role's workers lie over the nodes, as far as there is room."""
    return "pack" if role is Role.PREFILL and config.launcher.prefill_placement == "pack" else "spread"


@dataclass(frozen=True)
class Node:
    """A living node of a Ray cluster, and what of it is not taken."""

    id: str
    address: str
    labels: Mapping[str, str]
    free: Mapping[str, float]

    def has_labels_of(self, need: Need) -> bool:
        """Whether such workers may be on it, as far as labels go."""
        return all(_is_label(self.labels.get(name), wanted) for name, wanted in need.labels.items())

    def room_for(self, need: Need) -> int:
        """How many such workers it has room for."""
        if not self.has_labels_of(need):
            return 0
        return min(int((self.free.get(name, 0.0) + _ROUNDING) / amount) for name, amount in need.resources.items())


def _is_label(value: str | None, wanted: str) -> bool:
    """As Ray's label selectors have it: `A`, `in(A,B)`, and either after a `!`."""
    one = wanted.removeprefix("!")
    some = one[3:-1].split(",") if one.startswith("in(") and one.endswith(")") else [one]
    return (value in [name.strip() for name in some]) != wanted.startswith("!")


def choose_node(nodes: Sequence[Node], need: Need, strategy: Strategy, of_role: Mapping[str, int]) -> str | None:
    """The id of the node that the role's next worker belongs on; None: no node has room. `of_role`: how many workers of
    its role are on each node."""
    fitting = [(node.room_for(need), node) for node in nodes]
    fitting = [(room, node) for room, node in fitting if room > 0]
    if not fitting:
        return None
    sign = -1 if strategy == "pack" else 1
    return min(fitting, key=lambda item: (sign * of_role.get(item[1].id, 0), -item[0], item[1].id))[1].id


class Suspects:
    """Nodes where a worker was lost out of sight or a supervisor did not come up, which Ray may take a minute and more
    to give up. Each for some time, or until something on it answers."""

    def __init__(self, clock_s: Callable[[], float], lasting_s: float = 90.0) -> None:
        self._clock_s = clock_s
        self._lasting_s = lasting_s
        self._end_s: dict[str, float] = {}

    def __contains__(self, node: object) -> bool:
        return isinstance(node, str) and self._clock_s() < self._end_s.get(node, -math.inf)

    def add(self, node: str) -> None:
        """From now on."""
        self._end_s[node] = self._clock_s() + self._lasting_s

    def discard(self, node: str) -> None:
        """It answers."""
        self._end_s.pop(node, None)


def less_placed(nodes: Iterable[Node], totals: Mapping[str, Mapping[str, float]], placed: Placed) -> list[Node]:
    """The nodes with no more free than what this launcher's own workers leave of `totals`, by node: what a node says of
    itself is older than what was placed there just now. `placed`: a node's id and a need for each worker."""
    rest = {node: dict(total) for node, total in totals.items()}
    for node, need in placed:
        for name, amount in need.resources.items():
            if node in rest:
                rest[node][name] = rest[node].get(name, 0.0) - amount
    return [
        replace(node, free={name: min(amount, rest[node.id].get(name, 0.0)) for name, amount in node.free.items()})
        for node in nodes
    ]


def waiting_words(need: Need, nodes: Sequence[Node], totals: Mapping[str, Mapping[str, float]]) -> str:
    """What a worker waits for, for people. `totals`: all that each node has, by its id; one of which some is missing
    has no more than what is free."""
    if why := _in_vain(need, [replace(node, free={**node.free, **totals.get(node.id, {})}) for node in nodes]):
        return f"it needs {need.describe()}, all on one node, and no living node has that even when empty: {why}"
    shown = [f"{node.address}: {_amounts(node.free)}" for node in nodes[:_NODES_SHOWN]]
    return f"it needs {need.describe()}, all on one node; free: {'; '.join([*shown, *_more(nodes)]) or 'no node'}"


def _in_vain(need: Need, empty: Sequence[Node]) -> str:
    """Why none of the nodes could ever hold such a worker, if that is so and there are any. `empty`: with all that they
    have as free."""
    if not empty or any(node.room_for(need) for node in empty):
        return ""
    labelled = [node for node in empty if node.has_labels_of(need)]
    if not labelled:
        return "; ".join(_labels_there(name, empty) for name in need.labels)
    shown = [f"{node.address}: {_amounts(node.free)}" for node in labelled[:_NODES_SHOWN]]
    of_these = "with such labels there are " if need.labels else "there are "
    return of_these + "; ".join([*shown, *_more(labelled)])


def _labels_there(name: str, nodes: Iterable[Node]) -> str:
    values = sorted({node.labels[name] for node in nodes if name in node.labels})
    more = [f"and {len(values) - _NODES_SHOWN} more"] if len(values) > _NODES_SHOWN else []
    return f"{name} is {', '.join(values[:_NODES_SHOWN] + more)}" if values else f"none has a label {name}"


def _more(nodes: Sequence[Node]) -> list[str]:
    return [f"and {len(nodes) - _NODES_SHOWN} more nodes"] if len(nodes) > _NODES_SHOWN else []


def _amounts(free: Mapping[str, float]) -> str:
    shown = [f"{amount:g} {name}" for name, amount in sorted(free.items()) if amount > 0 and not _HIDDEN.search(name)]
    return ", ".join(shown) or "nothing"
