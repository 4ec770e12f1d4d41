"""What hardware gives: rates, how much of them the engine's steps reach, memory and links.

Profiles that come along are in `loopline.capacity.profiles`, which also reads those of files; `loopline.capacity.fit`
makes one of measurements.
"""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from loopline.errors import ConfigError
from loopline.schema_words import inner_fault

Rate = Annotated[float, Field(ge=1, le=1e20)]
"""Bytes or operations a second."""
Seconds = Annotated[float, Field(ge=0, le=1e6)]
Part = Annotated[float, Field(ge=1e-9, le=1)]


class _Record(BaseModel):
    """Frozen, no unknown keys, nothing that is not finite. Not strict: YAML takes 25e9 for text."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Link(_Record):
    """What carries KV from one worker to another."""

    peak_bytes_per_s: Rate
    """What the maker says of one direction."""
    bytes_per_s: Rate
    """What large pushes reach."""
    push_s: Seconds
    """What each push takes beside its bytes: posting, the notice, polls until it is seen."""

    @model_validator(mode="after")
    def _is_below_its_peak(self) -> "Link":
        if self.bytes_per_s > self.peak_bytes_per_s:
            raise inner_fault("bytes_per_s", self.bytes_per_s, "up to peak_bytes_per_s")
        return self

    def floor_s(self, num_bytes: float) -> float:
        """Seconds below which no transfer of so many bytes can be."""
        return num_bytes / self.peak_bytes_per_s

    def expected_s(self, num_bytes: float, pushes: int) -> float:
        """Seconds of `pushes` pushes one after the other."""
        return num_bytes / self.bytes_per_s + pushes * self.push_s


class Profile(_Record):
    """One worker's device, and the links from it."""

    name: str
    source: str
    """Where the figures are from."""
    device: str = ""
    """What steps were measured on, in a report's words; empty: not in one."""
    model: str = ""
    """The model that they were measured with."""
    memory_bytes: int | None = Field(default=None, ge=1, le=2**60)
    """Memory free on the device before a worker starts; null: not known, and so no arena without num_blocks."""
    bytes_per_s: Rate
    """Memory: bytes read and written in a large copy."""
    flops_per_s: Mapping[str, Rate]
    """Large matrix products, by dtype (fp32, bf16)."""
    weights_efficiency: Part
    """Part of `bytes_per_s` at which steps read weights; as the other two at most 1, or steps would be below floors."""
    kv_efficiency: Part
    """Part of `bytes_per_s` at which attention goes through keys and values."""
    flops_efficiency: Part
    """Part of `flops_per_s` that steps reach."""
    layer_pass_s: Seconds
    """What each layer of a pass takes beside its bytes and operations: starting kernels, or Python."""
    row_tile: int = Field(default=1, ge=1, le=4096)
    """Rows of a step are padded to a multiple of it."""
    links: Mapping[str, Link] = Field(default_factory=dict)
    default_link: str = ""
    """The link of pushes where none is named."""

    def rate_of(self, dtype: str) -> float:
        """Matrix products of that dtype, operations a second. Raises ConfigError where the profile has none."""
        if dtype not in self.flops_per_s:
            raise ConfigError(f"profile {self.name}: flops_per_s has no {dtype}; it has {', '.join(self.flops_per_s)}")
        return self.flops_per_s[dtype]

    def link(self, name: str | None) -> tuple[str, Link]:
        """The link of that name, or the default one. Raises ConfigError for one that the profile has not."""
        chosen = name or self.default_link
        if chosen not in self.links:
            raise ConfigError(f"link is {chosen!r}; profile {self.name} has: {', '.join(self.links) or 'none'}")
        return chosen, self.links[chosen]
