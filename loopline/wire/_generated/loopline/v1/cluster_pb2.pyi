from loopline.wire._generated.loopline.v1 import loopline_pb2 as _loopline_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerId(_message.Message):
    __slots__ = ("uuid", "epoch")
    UUID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    epoch: int
    def __init__(self, uuid: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("worker", "name", "address")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerId
    name: str
    address: str
    def __init__(self, worker: _Optional[_Union[WorkerId, _Mapping]] = ..., name: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class HandoffKey(_message.Message):
    __slots__ = ("request_id", "generation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: int
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class BlockRun(_message.Message):
    __slots__ = ("start", "count")
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    start: int
    count: int
    def __init__(self, start: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class FingerprintField(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Fingerprint(_message.Message):
    __slots__ = ("fields",)
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    fields: _containers.RepeatedCompositeFieldContainer[FingerprintField]
    def __init__(self, fields: _Optional[_Iterable[_Union[FingerprintField, _Mapping]]] = ...) -> None: ...

class RegionManifest(_message.Message):
    __slots__ = ("base_address", "num_blocks", "block_bytes", "memory_kind", "device_id", "null_block")
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_KIND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    NULL_BLOCK_FIELD_NUMBER: _ClassVar[int]
    base_address: int
    num_blocks: int
    block_bytes: int
    memory_kind: str
    device_id: int
    null_block: int
    def __init__(self, base_address: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., memory_kind: _Optional[str] = ..., device_id: _Optional[int] = ..., null_block: _Optional[int] = ...) -> None: ...

class Capacity(_message.Message):
    __slots__ = ("block_size", "total_blocks", "max_running", "token_bytes", "growth_share")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    GROWTH_SHARE_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    total_blocks: int
    max_running: int
    token_bytes: int
    growth_share: float
    def __init__(self, block_size: _Optional[int] = ..., total_blocks: _Optional[int] = ..., max_running: _Optional[int] = ..., token_bytes: _Optional[int] = ..., growth_share: _Optional[float] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("step", "busy", "running", "waiting", "token_loops", "promised_blocks", "blocks", "handoffs", "ignored", "budget", "known", "prompt_token_loops_per_s")
    class HandoffsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class IgnoredEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    TOKEN_LOOPS_FIELD_NUMBER: _ClassVar[int]
    PROMISED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    IGNORED_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_LOOPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    step: int
    busy: bool
    running: int
    waiting: int
    token_loops: int
    promised_blocks: int
    blocks: _loopline_pb2.Blocks
    handoffs: _containers.ScalarMap[str, int]
    ignored: _containers.ScalarMap[str, int]
    budget: _loopline_pb2.BudgetCounts
    known: _containers.RepeatedCompositeFieldContainer[HandoffKey]
    prompt_token_loops_per_s: float
    def __init__(self, step: _Optional[int] = ..., busy: _Optional[bool] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., token_loops: _Optional[int] = ..., promised_blocks: _Optional[int] = ..., blocks: _Optional[_Union[_loopline_pb2.Blocks, _Mapping]] = ..., handoffs: _Optional[_Mapping[str, int]] = ..., ignored: _Optional[_Mapping[str, int]] = ..., budget: _Optional[_Union[_loopline_pb2.BudgetCounts, _Mapping]] = ..., known: _Optional[_Iterable[_Union[HandoffKey, _Mapping]]] = ..., prompt_token_loops_per_s: _Optional[float] = ...) -> None: ...

class ResolvedParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "stop_ids", "logprobs", "loops", "initial_state", "exit_probabilities")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOOPS_FIELD_NUMBER: _ClassVar[int]
    INITIAL_STATE_FIELD_NUMBER: _ClassVar[int]
    EXIT_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    loops: int
    initial_state: str
    exit_probabilities: bool
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., stop_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., loops: _Optional[int] = ..., initial_state: _Optional[str] = ..., exit_probabilities: _Optional[bool] = ...) -> None: ...

class EngineRequest(_message.Message):
    __slots__ = ("request_id", "prompt_ids", "params", "attempt", "generated_ids", "session")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GENERATED_IDS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    params: ResolvedParams
    attempt: int
    generated_ids: _containers.RepeatedScalarFieldContainer[int]
    session: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., params: _Optional[_Union[ResolvedParams, _Mapping]] = ..., attempt: _Optional[int] = ..., generated_ids: _Optional[_Iterable[int]] = ..., session: _Optional[str] = ...) -> None: ...

class TokenRow(_message.Message):
    __slots__ = ("request_id", "attempt", "position", "token_id", "depth", "finish", "logprobs", "exit_probabilities")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EXIT_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    position: int
    token_id: int
    depth: int
    finish: str
    logprobs: TokenLogprobs
    exit_probabilities: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., position: _Optional[int] = ..., token_id: _Optional[int] = ..., depth: _Optional[int] = ..., finish: _Optional[str] = ..., logprobs: _Optional[_Union[TokenLogprobs, _Mapping]] = ..., exit_probabilities: _Optional[_Iterable[float]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("chosen", "top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: float
    top: _containers.RepeatedCompositeFieldContainer[_loopline_pb2.TokenLogprob]
    def __init__(self, chosen: _Optional[float] = ..., top: _Optional[_Iterable[_Union[_loopline_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("peer", "role", "pid", "fingerprint", "capacity", "metrics_address")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    peer: Peer
    role: str
    pid: int
    fingerprint: Fingerprint
    capacity: Capacity
    metrics_address: str
    def __init__(self, peer: _Optional[_Union[Peer, _Mapping]] = ..., role: _Optional[str] = ..., pid: _Optional[int] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., capacity: _Optional[_Union[Capacity, _Mapping]] = ..., metrics_address: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("load", "draining", "lag_s")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LAG_S_FIELD_NUMBER: _ClassVar[int]
    load: WorkerLoad
    draining: bool
    lag_s: float
    def __init__(self, load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., draining: _Optional[bool] = ..., lag_s: _Optional[float] = ...) -> None: ...

class PairReady(_message.Message):
    __slots__ = ("decode", "transport", "bytes_per_s")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    decode: WorkerId
    transport: str
    bytes_per_s: float
    def __init__(self, decode: _Optional[_Union[WorkerId, _Mapping]] = ..., transport: _Optional[str] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class PairFailed(_message.Message):
    __slots__ = ("decode", "reason")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    decode: WorkerId
    reason: str
    def __init__(self, decode: _Optional[_Union[WorkerId, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("key", "cached_tokens", "cause", "detail")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    cached_tokens: int
    cause: str
    detail: str
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., cause: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class Granted(_message.Message):
    __slots__ = ("key", "writer", "first_block", "runs", "cause", "detail")
    KEY_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    writer: WorkerId
    first_block: int
    runs: _containers.RepeatedCompositeFieldContainer[BlockRun]
    cause: str
    detail: str
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., writer: _Optional[_Union[WorkerId, _Mapping]] = ..., first_block: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[BlockRun, _Mapping]]] = ..., cause: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class LocalPrefillStarted(_message.Message):
    __slots__ = ("key", "cause", "detail")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    cause: str
    detail: str
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., cause: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class Prefilled(_message.Message):
    __slots__ = ("key", "attempt", "token", "stats")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    attempt: int
    token: TokenRow
    stats: _loopline_pb2.HandoffStats
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., attempt: _Optional[int] = ..., token: _Optional[_Union[TokenRow, _Mapping]] = ..., stats: _Optional[_Union[_loopline_pb2.HandoffStats, _Mapping]] = ...) -> None: ...

class StepTokens(_message.Message):
    __slots__ = ("step", "rows")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    step: int
    rows: _containers.RepeatedCompositeFieldContainer[TokenRow]
    def __init__(self, step: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[TokenRow, _Mapping]]] = ...) -> None: ...

class RequestFailed(_message.Message):
    __slots__ = ("key", "cause", "detail")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    cause: str
    detail: str
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., cause: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class PrefixReport(_message.Message):
    __slots__ = ("number", "is_whole", "part", "num_parts", "published", "evicted")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    IS_WHOLE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    number: int
    is_whole: bool
    part: int
    num_parts: int
    published: bytes
    evicted: bytes
    def __init__(self, number: _Optional[int] = ..., is_whole: _Optional[bool] = ..., part: _Optional[int] = ..., num_parts: _Optional[int] = ..., published: _Optional[bytes] = ..., evicted: _Optional[bytes] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("coordinator_epoch", "register", "heartbeat", "pair_ready", "pair_failed", "reserved", "granted", "prefilled", "step_tokens", "request_failed", "prefix_report", "local_prefill_started")
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    PAIR_READY_FIELD_NUMBER: _ClassVar[int]
    PAIR_FAILED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FAILED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_REPORT_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_STARTED_FIELD_NUMBER: _ClassVar[int]
    coordinator_epoch: int
    register: Register
    heartbeat: Heartbeat
    pair_ready: PairReady
    pair_failed: PairFailed
    reserved: Reserved
    granted: Granted
    prefilled: Prefilled
    step_tokens: StepTokens
    request_failed: RequestFailed
    prefix_report: PrefixReport
    local_prefill_started: LocalPrefillStarted
    def __init__(self, coordinator_epoch: _Optional[int] = ..., register: _Optional[_Union[Register, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., pair_ready: _Optional[_Union[PairReady, _Mapping]] = ..., pair_failed: _Optional[_Union[PairFailed, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., granted: _Optional[_Union[Granted, _Mapping]] = ..., prefilled: _Optional[_Union[Prefilled, _Mapping]] = ..., step_tokens: _Optional[_Union[StepTokens, _Mapping]] = ..., request_failed: _Optional[_Union[RequestFailed, _Mapping]] = ..., prefix_report: _Optional[_Union[PrefixReport, _Mapping]] = ..., local_prefill_started: _Optional[_Union[LocalPrefillStarted, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("epoch", "lease_s")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    lease_s: float
    def __init__(self, epoch: _Optional[int] = ..., lease_s: _Optional[float] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("reason", "retry")
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    reason: str
    retry: bool
    def __init__(self, reason: _Optional[str] = ..., retry: _Optional[bool] = ...) -> None: ...

class Pair(_message.Message):
    __slots__ = ("decode",)
    DECODE_FIELD_NUMBER: _ClassVar[int]
    decode: Peer
    def __init__(self, decode: _Optional[_Union[Peer, _Mapping]] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("key", "request", "deadline_s", "trace")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    request: EngineRequest
    deadline_s: float
    trace: str
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., request: _Optional[_Union[EngineRequest, _Mapping]] = ..., deadline_s: _Optional[float] = ..., trace: _Optional[str] = ...) -> None: ...

class Bind(_message.Message):
    __slots__ = ("key", "writer")
    KEY_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    writer: Peer
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., writer: _Optional[_Union[Peer, _Mapping]] = ...) -> None: ...

class StartLocalPrefill(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ...) -> None: ...

class StartPrefill(_message.Message):
    __slots__ = ("key", "request", "target", "first_block", "runs", "deadline_s", "trace", "fetch_from_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    FETCH_FROM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    request: EngineRequest
    target: Peer
    first_block: int
    runs: _containers.RepeatedCompositeFieldContainer[BlockRun]
    deadline_s: float
    trace: str
    fetch_from_tokens: int
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., request: _Optional[_Union[EngineRequest, _Mapping]] = ..., target: _Optional[_Union[Peer, _Mapping]] = ..., first_block: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[BlockRun, _Mapping]]] = ..., deadline_s: _Optional[float] = ..., trace: _Optional[str] = ..., fetch_from_tokens: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("key", "cause")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    cause: str
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., cause: _Optional[str] = ...) -> None: ...

class PeerGone(_message.Message):
    __slots__ = ("worker", "proven")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PROVEN_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerId
    proven: bool
    def __init__(self, worker: _Optional[_Union[WorkerId, _Mapping]] = ..., proven: _Optional[bool] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("limit_s",)
    LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    limit_s: float
    def __init__(self, limit_s: _Optional[float] = ...) -> None: ...

class ReportPrefixes(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CoordinatorMessage(_message.Message):
    __slots__ = ("coordinator_epoch", "welcome", "rejected", "pair", "reserve", "bind", "start_prefill", "cancel", "peer_gone", "drain", "report_prefixes", "start_local_prefill")
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    BIND_FIELD_NUMBER: _ClassVar[int]
    START_PREFILL_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PEER_GONE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    REPORT_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    START_LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    coordinator_epoch: int
    welcome: Welcome
    rejected: Rejected
    pair: Pair
    reserve: Reserve
    bind: Bind
    start_prefill: StartPrefill
    cancel: Cancel
    peer_gone: PeerGone
    drain: Drain
    report_prefixes: ReportPrefixes
    start_local_prefill: StartLocalPrefill
    def __init__(self, coordinator_epoch: _Optional[int] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., pair: _Optional[_Union[Pair, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., bind: _Optional[_Union[Bind, _Mapping]] = ..., start_prefill: _Optional[_Union[StartPrefill, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., peer_gone: _Optional[_Union[PeerGone, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., report_prefixes: _Optional[_Union[ReportPrefixes, _Mapping]] = ..., start_local_prefill: _Optional[_Union[StartLocalPrefill, _Mapping]] = ...) -> None: ...

class WorkerExit(_message.Message):
    __slots__ = ("pid", "exit_status", "name", "uuid")
    PID_FIELD_NUMBER: _ClassVar[int]
    EXIT_STATUS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    pid: int
    exit_status: int
    name: str
    uuid: str
    def __init__(self, pid: _Optional[int] = ..., exit_status: _Optional[int] = ..., name: _Optional[str] = ..., uuid: _Optional[str] = ...) -> None: ...

class WorkerExitAnswer(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerCounts(_message.Message):
    __slots__ = ("prefill", "decode", "unified")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    UNIFIED_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    unified: int
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., unified: _Optional[int] = ...) -> None: ...

class KeptWorker(_message.Message):
    __slots__ = ("name", "role", "leaving", "waits_for")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    leaving: bool
    waits_for: str
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., leaving: _Optional[bool] = ..., waits_for: _Optional[str] = ...) -> None: ...

class LauncherReport(_message.Message):
    __slots__ = ("launcher", "place", "restarts", "wanted", "revision", "workers", "ended")
    LAUNCHER_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    launcher: str
    place: str
    restarts: bool
    wanted: WorkerCounts
    revision: int
    workers: _containers.RepeatedCompositeFieldContainer[KeptWorker]
    ended: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, launcher: _Optional[str] = ..., place: _Optional[str] = ..., restarts: _Optional[bool] = ..., wanted: _Optional[_Union[WorkerCounts, _Mapping]] = ..., revision: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[KeptWorker, _Mapping]]] = ..., ended: _Optional[_Iterable[str]] = ...) -> None: ...

class Wanted(_message.Message):
    __slots__ = ("counts", "revision")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    counts: WorkerCounts
    revision: int
    def __init__(self, counts: _Optional[_Union[WorkerCounts, _Mapping]] = ..., revision: _Optional[int] = ...) -> None: ...

class Connect(_message.Message):
    __slots__ = ("peer", "fingerprint", "agent_metadata")
    PEER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    peer: Peer
    fingerprint: Fingerprint
    agent_metadata: bytes
    def __init__(self, peer: _Optional[_Union[Peer, _Mapping]] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., agent_metadata: _Optional[bytes] = ...) -> None: ...

class Connected(_message.Message):
    __slots__ = ("peer", "fingerprint", "agent_metadata", "region")
    PEER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    peer: Peer
    fingerprint: Fingerprint
    agent_metadata: bytes
    region: RegionManifest
    def __init__(self, peer: _Optional[_Union[Peer, _Mapping]] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., agent_metadata: _Optional[bytes] = ..., region: _Optional[_Union[RegionManifest, _Mapping]] = ...) -> None: ...

class PushRange(_message.Message):
    __slots__ = ("seq", "first_block", "num_blocks")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    first_block: int
    num_blocks: int
    def __init__(self, seq: _Optional[int] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("key", "writer", "attempt", "token", "pushes")
    KEY_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    writer: WorkerId
    attempt: int
    token: TokenRow
    pushes: _containers.RepeatedCompositeFieldContainer[PushRange]
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., writer: _Optional[_Union[WorkerId, _Mapping]] = ..., attempt: _Optional[int] = ..., token: _Optional[_Union[TokenRow, _Mapping]] = ..., pushes: _Optional[_Iterable[_Union[PushRange, _Mapping]]] = ...) -> None: ...

class CommitAnswer(_message.Message):
    __slots__ = ("cause",)
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    cause: str
    def __init__(self, cause: _Optional[str] = ...) -> None: ...

class CloseHandoffRequest(_message.Message):
    __slots__ = ("key", "writer")
    KEY_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    writer: WorkerId
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., writer: _Optional[_Union[WorkerId, _Mapping]] = ...) -> None: ...

class FetchPrefixRequest(_message.Message):
    __slots__ = ("key", "reader", "agent_metadata", "region", "first_block", "runs", "limit_s")
    KEY_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    reader: Peer
    agent_metadata: bytes
    region: RegionManifest
    first_block: int
    runs: _containers.RepeatedCompositeFieldContainer[BlockRun]
    limit_s: float
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., reader: _Optional[_Union[Peer, _Mapping]] = ..., agent_metadata: _Optional[bytes] = ..., region: _Optional[_Union[RegionManifest, _Mapping]] = ..., first_block: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[BlockRun, _Mapping]]] = ..., limit_s: _Optional[float] = ...) -> None: ...

class PrefixSent(_message.Message):
    __slots__ = ("key", "writer", "pushes", "cause", "detail")
    KEY_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    writer: WorkerId
    pushes: _containers.RepeatedCompositeFieldContainer[PushRange]
    cause: str
    detail: str
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., writer: _Optional[_Union[WorkerId, _Mapping]] = ..., pushes: _Optional[_Iterable[_Union[PushRange, _Mapping]]] = ..., cause: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class HandoffClosed(_message.Message):
    __slots__ = ("key", "state")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    state: str
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., state: _Optional[str] = ...) -> None: ...

class PushNotice(_message.Message):
    __slots__ = ("key", "range", "digest")
    KEY_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    range: PushRange
    digest: bytes
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., range: _Optional[_Union[PushRange, _Mapping]] = ..., digest: _Optional[bytes] = ...) -> None: ...
