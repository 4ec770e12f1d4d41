from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InitialState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INITIAL_STATE_UNSPECIFIED: _ClassVar[InitialState]
    INITIAL_STATE_NOISE: _ClassVar[InitialState]
    INITIAL_STATE_ZEROS: _ClassVar[InitialState]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_DEADLINE: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
INITIAL_STATE_UNSPECIFIED: InitialState
INITIAL_STATE_NOISE: InitialState
INITIAL_STATE_ZEROS: InitialState
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_DEADLINE: FinishReason
FINISH_REASON_ERROR: FinishReason

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: bytes
    def __init__(self, role: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class ChatMessages(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("text", "messages", "token_ids", "label", "sampling", "deadline_s", "delivered_token_ids", "priority", "session")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    text: bytes
    messages: ChatMessages
    token_ids: TokenIds
    label: str
    sampling: SamplingParams
    deadline_s: float
    delivered_token_ids: _containers.RepeatedScalarFieldContainer[int]
    priority: int
    session: str
    def __init__(self, text: _Optional[bytes] = ..., messages: _Optional[_Union[ChatMessages, _Mapping]] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., label: _Optional[str] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., deadline_s: _Optional[float] = ..., delivered_token_ids: _Optional[_Iterable[int]] = ..., priority: _Optional[int] = ..., session: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "stop", "stop_token_ids", "ignore_eos", "logprobs", "loops", "initial_state", "exit_probabilities")
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
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
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
    stop: _containers.RepeatedScalarFieldContainer[bytes]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    loops: int
    initial_state: InitialState
    exit_probabilities: bool
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., stop: _Optional[_Iterable[bytes]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., loops: _Optional[int] = ..., initial_state: _Optional[_Union[InitialState, str]] = ..., exit_probabilities: _Optional[bool] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("id", "depth", "logprob", "top_logprobs", "exit_probabilities")
    ID_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EXIT_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    id: int
    depth: int
    logprob: float
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    exit_probabilities: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, id: _Optional[int] = ..., depth: _Optional[int] = ..., logprob: _Optional[float] = ..., top_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., exit_probabilities: _Optional[_Iterable[float]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("request_id", "seed", "prompt_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    seed: int
    prompt_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., seed: _Optional[int] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("tokens", "text")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    text: str
    def __init__(self, tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., text: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("queued_s", "ttft_s", "total_s")
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    queued_s: float
    ttft_s: float
    total_s: float
    def __init__(self, queued_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., total_s: _Optional[float] = ...) -> None: ...

class Route(_message.Message):
    __slots__ = ("prefill", "decode", "earlier", "prefix_source")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    EARLIER_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SOURCE_FIELD_NUMBER: _ClassVar[int]
    prefill: str
    decode: str
    earlier: _containers.RepeatedScalarFieldContainer[str]
    prefix_source: str
    def __init__(self, prefill: _Optional[str] = ..., decode: _Optional[str] = ..., earlier: _Optional[_Iterable[str]] = ..., prefix_source: _Optional[str] = ...) -> None: ...

class HandoffStats(_message.Message):
    __slots__ = ("pushes", "descriptors", "num_bytes", "transport", "prefill_s", "cached_tokens", "fetched_bytes")
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    pushes: int
    descriptors: int
    num_bytes: int
    transport: str
    prefill_s: float
    cached_tokens: int
    fetched_bytes: int
    def __init__(self, pushes: _Optional[int] = ..., descriptors: _Optional[int] = ..., num_bytes: _Optional[int] = ..., transport: _Optional[str] = ..., prefill_s: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., fetched_bytes: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "text", "usage", "timing", "route", "handoff", "has_text")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    HAS_TEXT_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    text: str
    usage: Usage
    timing: Timing
    route: Route
    handoff: HandoffStats
    has_text: bool
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., text: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., route: _Optional[_Union[Route, _Mapping]] = ..., handoff: _Optional[_Union[HandoffStats, _Mapping]] = ..., has_text: _Optional[bool] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("accepted", "chunk", "finished")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    chunk: Chunk
    finished: Finished
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "family", "dtype", "vocab_size", "context_tokens", "default_loops", "max_loops", "has_tokenizer", "has_chat_template", "kv_bytes_per_token", "arena_tokens", "stop_token_ids")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_LOOPS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOOPS_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ARENA_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    family: str
    dtype: str
    vocab_size: int
    context_tokens: int
    default_loops: int
    max_loops: int
    has_tokenizer: bool
    has_chat_template: bool
    kv_bytes_per_token: int
    arena_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., family: _Optional[str] = ..., dtype: _Optional[str] = ..., vocab_size: _Optional[int] = ..., context_tokens: _Optional[int] = ..., default_loops: _Optional[int] = ..., max_loops: _Optional[int] = ..., has_tokenizer: _Optional[bool] = ..., has_chat_template: _Optional[bool] = ..., kv_bytes_per_token: _Optional[int] = ..., arena_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Blocks(_message.Message):
    __slots__ = ("free", "held", "cached", "quarantined", "total")
    FREE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    free: int
    held: int
    cached: int
    quarantined: int
    total: int
    def __init__(self, free: _Optional[int] = ..., held: _Optional[int] = ..., cached: _Optional[int] = ..., quarantined: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("name", "role", "state", "pid", "address", "uuid", "epoch", "running", "waiting", "blocks", "handoffs", "ignored", "step", "heartbeat_age_s", "links", "budget", "metrics_address", "waits_for")
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
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    IGNORED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    state: str
    pid: int
    address: str
    uuid: str
    epoch: int
    running: int
    waiting: int
    blocks: Blocks
    handoffs: _containers.ScalarMap[str, int]
    ignored: _containers.ScalarMap[str, int]
    step: int
    heartbeat_age_s: float
    links: _containers.RepeatedCompositeFieldContainer[Link]
    budget: BudgetCounts
    metrics_address: str
    waits_for: str
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., state: _Optional[str] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., uuid: _Optional[str] = ..., epoch: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., blocks: _Optional[_Union[Blocks, _Mapping]] = ..., handoffs: _Optional[_Mapping[str, int]] = ..., ignored: _Optional[_Mapping[str, int]] = ..., step: _Optional[int] = ..., heartbeat_age_s: _Optional[float] = ..., links: _Optional[_Iterable[_Union[Link, _Mapping]]] = ..., budget: _Optional[_Union[BudgetCounts, _Mapping]] = ..., metrics_address: _Optional[str] = ..., waits_for: _Optional[str] = ...) -> None: ...

class BudgetCounts(_message.Message):
    __slots__ = ("in_flight_bytes", "limit_bytes", "num_waiting", "waited_s")
    IN_FLIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    in_flight_bytes: int
    limit_bytes: int
    num_waiting: int
    waited_s: float
    def __init__(self, in_flight_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., num_waiting: _Optional[int] = ..., waited_s: _Optional[float] = ...) -> None: ...

class Link(_message.Message):
    __slots__ = ("peer", "transport", "bytes_per_s", "is_slow")
    PEER_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    IS_SLOW_FIELD_NUMBER: _ClassVar[int]
    peer: str
    transport: str
    bytes_per_s: float
    is_slow: bool
    def __init__(self, peer: _Optional[str] = ..., transport: _Optional[str] = ..., bytes_per_s: _Optional[float] = ..., is_slow: _Optional[bool] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("workers", "queued", "running", "serving", "epoch", "launcher")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAUNCHER_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    queued: int
    running: int
    serving: bool
    epoch: int
    launcher: Launcher
    def __init__(self, workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., queued: _Optional[int] = ..., running: _Optional[int] = ..., serving: _Optional[bool] = ..., epoch: _Optional[int] = ..., launcher: _Optional[_Union[Launcher, _Mapping]] = ...) -> None: ...

class Launcher(_message.Message):
    __slots__ = ("place", "restarts", "prefill", "decode", "workers", "unified")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    UNIFIED_FIELD_NUMBER: _ClassVar[int]
    place: str
    restarts: bool
    prefill: int
    decode: int
    workers: _containers.RepeatedCompositeFieldContainer[LaunchedWorker]
    unified: int
    def __init__(self, place: _Optional[str] = ..., restarts: _Optional[bool] = ..., prefill: _Optional[int] = ..., decode: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[LaunchedWorker, _Mapping]]] = ..., unified: _Optional[int] = ...) -> None: ...

class LaunchedWorker(_message.Message):
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
