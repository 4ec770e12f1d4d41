"""What each worker needs of a Ray cluster's node, and which workers are placed together. Pure: no Ray here."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from loopline.config import ClusterConfig
from loopline.errors import ConfigError
from loopline.identity import Role
from loopline.launcher_messages import KeptWorker


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


def strategy_of(config: ClusterConfig, role: Role) -> str:
    """Ray's name of how the role's workers lie over the nodes, as far as there is room."""
    return "PACK" if role is Role.PREFILL and config.launcher.prefill_placement == "pack" else "SPREAD"


@dataclass(eq=False)
class Group:
    """Workers of one role that are placed together: a placement group with a bundle for each of them."""

    role: Role
    holders: list[str | None] = field(default_factory=list)  # by bundle: the worker's name, None: free

    @property
    def is_empty(self) -> bool:
        return all(holder is None for holder in self.holders)


@dataclass(frozen=True)
class Slot:
    """One worker's place: a bundle of a group."""

    group: Group
    bundle: int


class Groups:
    """Invariant: each expected worker has one slot until it is released. Who comes later takes a free slot of its role
    first; those for whom there is none make a group of their own."""

    def __init__(self) -> None:
        self._groups: list[Group] = []

    def slot(self, name: str) -> Slot:
        """Of a worker that was expected."""
        group = next(group for group in self._groups if name in group.holders)
        return Slot(group, group.holders.index(name))

    def expect(self, workers: Iterable[KeptWorker]) -> list[Group]:
        """The new groups."""
        missing: dict[Role, list[str | None]] = {}
        for worker in workers:
            free = next((g for g in self._groups if g.role is worker.role and None in g.holders), None)
            if free is None:
                missing.setdefault(worker.role, []).append(worker.name)
            else:
                free.holders[free.holders.index(None)] = worker.name
        groups = [Group(role, names) for role, names in missing.items()]
        self._groups += groups
        return groups

    def release(self, name: str) -> Group | None:
        """The group, if it was its last worker: its place in the cluster is to be given back."""
        slot = self.slot(name)
        slot.group.holders[slot.bundle] = None
        if not slot.group.is_empty:
            return None
        self._groups.remove(slot.group)
        return slot.group
