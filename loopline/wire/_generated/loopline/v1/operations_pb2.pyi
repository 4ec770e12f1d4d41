from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ScaleRequest(_message.Message):
    __slots__ = ("prefill", "decode", "unified")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    UNIFIED_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    unified: int
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., unified: _Optional[int] = ...) -> None: ...

class ScaleAnswer(_message.Message):
    __slots__ = ("prefill_before", "decode_before", "prefill", "decode", "unified_before", "unified")
    PREFILL_BEFORE_FIELD_NUMBER: _ClassVar[int]
    DECODE_BEFORE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    UNIFIED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    UNIFIED_FIELD_NUMBER: _ClassVar[int]
    prefill_before: int
    decode_before: int
    prefill: int
    decode: int
    unified_before: int
    unified: int
    def __init__(self, prefill_before: _Optional[int] = ..., decode_before: _Optional[int] = ..., prefill: _Optional[int] = ..., decode: _Optional[int] = ..., unified_before: _Optional[int] = ..., unified: _Optional[int] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker", "limit_s")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    worker: str
    limit_s: float
    def __init__(self, worker: _Optional[str] = ..., limit_s: _Optional[float] = ...) -> None: ...

class DrainWorkerAnswer(_message.Message):
    __slots__ = ("uuid", "limit_s", "returns")
    UUID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    RETURNS_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    limit_s: float
    returns: bool
    def __init__(self, uuid: _Optional[str] = ..., limit_s: _Optional[float] = ..., returns: _Optional[bool] = ...) -> None: ...
