"""What is read of the reports of `loopline bench engine` and `loopline bench transfer`: these fields and no others,
each finite and within what could have been measured."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from loopline.capacity.hardware import Rate

Count = Annotated[int, Field(ge=1, le=10**7)]
NumBytes = Annotated[int, Field(ge=1, le=2**60)]
Milliseconds = Annotated[float, Field(ge=1e-6, le=1e9)]


class _Part(BaseModel):
    """Frozen; other keys are left alone, values are not converted."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


class ReportMachine(_Part):
    """Where it was measured."""

    device: str
    command: str
    date: str


class ReportModel(_Part):
    """What was measured."""

    name: str
    loops: Annotated[int, Field(ge=1, le=4096)]
    dtype: Literal["fp32", "bf16"]


class ReportRates(_Part):
    """What the device reaches in large copies and products."""

    copy_bytes_per_s: Rate
    matmul_flops_per_s: Rate


class Arm(_Part):
    """One way of a point; without figures where it failed."""

    median_ms: Milliseconds | None = None


class PointArms(_Part):
    """Of a point, the engine's own ways: decode's and prefill's."""

    engine: Arm = Arm()
    packed: Arm = Arm()


class DecodePointReport(_Part):
    """A step of `rows` rows behind `context` tokens each."""

    rows: Count
    context: Annotated[int, Field(ge=0, le=10**7)]
    arms: PointArms = PointArms()


class PrefillPointReport(_Part):
    """A pass over `prompts` prompts of `tokens` tokens each."""

    prompts: Count
    tokens: Count
    arms: PointArms = PointArms()


class EngineReport(_Part):
    """Of `loopline bench engine`."""

    machine: ReportMachine
    model: ReportModel
    rates: ReportRates
    decode: list[DecodePointReport]
    prefill: list[PrefillPointReport]


class FlatArm(_Part):
    """One range of bytes; without figures where it failed."""

    bytes: NumBytes | None = None
    total_ms: Milliseconds | None = None


class TransferArms(_Part):
    """Of a transfer, the one that is read."""

    flat: FlatArm = FlatArm()


class OneChunk(_Part):
    """One chunk alone."""

    ms: Milliseconds | None = None


class Overlap(_Part):
    """Chunks that are pushed while others are computed."""

    chunk_bytes: NumBytes
    one_chunk: OneChunk = OneChunk()


class TransferReport(_Part):
    """Of `loopline bench transfer`."""

    arms: TransferArms
    overlap: Overlap | None = None
