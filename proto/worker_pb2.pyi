from . import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Task(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_UNSPECIFIED: _ClassVar[Task]
    TASK_COLOCATED: _ClassVar[Task]
    TASK_PREFILL: _ClassVar[Task]
    TASK_DECODE: _ClassVar[Task]

class Turn(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TURN_UNSPECIFIED: _ClassVar[Turn]
    TURN_FIRST_OF_PRIORITY: _ClassVar[Turn]
    TURN_IN_ORDER: _ClassVar[Turn]

class FailureKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_KIND_UNSPECIFIED: _ClassVar[FailureKind]
    FAILURE_KIND_INVALID: _ClassVar[FailureKind]
    FAILURE_KIND_FULL: _ClassVar[FailureKind]
    FAILURE_KIND_TRANSFER: _ClassVar[FailureKind]
    FAILURE_KIND_PREEMPTED: _ClassVar[FailureKind]
    FAILURE_KIND_WORKER: _ClassVar[FailureKind]
    FAILURE_KIND_GONE: _ClassVar[FailureKind]
    FAILURE_KIND_NOT_FINITE: _ClassVar[FailureKind]
    FAILURE_KIND_UNABLE: _ClassVar[FailureKind]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
TASK_UNSPECIFIED: Task
TASK_COLOCATED: Task
TASK_PREFILL: Task
TASK_DECODE: Task
TURN_UNSPECIFIED: Turn
TURN_FIRST_OF_PRIORITY: Turn
TURN_IN_ORDER: Turn
FAILURE_KIND_UNSPECIFIED: FailureKind
FAILURE_KIND_INVALID: FailureKind
FAILURE_KIND_FULL: FailureKind
FAILURE_KIND_TRANSFER: FailureKind
FAILURE_KIND_PREEMPTED: FailureKind
FAILURE_KIND_WORKER: FailureKind
FAILURE_KIND_GONE: FailureKind
FAILURE_KIND_NOT_FINITE: FailureKind
FAILURE_KIND_UNABLE: FailureKind
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role

class LeasePrefixRequest(_message.Message):
    __slots__ = ("hashes",)
    HASHES_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LeasePrefixResponse(_message.Message):
    __slots__ = ("kv",)
    KV_FIELD_NUMBER: _ClassVar[int]
    kv: KvHandle
    def __init__(self, kv: _Optional[_Union[KvHandle, _Mapping]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("folder", "fingerprint")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    folder: str
    fingerprint: bytes
    def __init__(self, folder: _Optional[str] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: str
    def __init__(self, error: _Optional[str] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("submit", "cancel", "suspend")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    SUSPEND_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    cancel: Cancel
    suspend: Suspend
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., suspend: _Optional[_Union[Suspend, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "attempt", "task", "token_ids", "first_index", "max_tokens", "sampling", "stop_token_ids", "ignore_eos", "cache_salt", "kv", "num_choices", "first_choice", "beam_search", "logprobs", "prompt_logprobs", "bad_words", "min_tokens", "grammar", "priority", "adapter", "pooling", "prefix_holder", "tenant", "turn", "processed_logprobs", "watermark", "retentions")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHOICE_FIELD_NUMBER: _ClassVar[int]
    BEAM_SEARCH_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HOLDER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    PROCESSED_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    RETENTIONS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    task: Task
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    first_index: int
    max_tokens: int
    sampling: _inference_pb2.SamplingParams
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    cache_salt: bytes
    kv: KvHandle
    num_choices: int
    first_choice: int
    beam_search: _inference_pb2.BeamSearch
    logprobs: int
    prompt_logprobs: int
    bad_words: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenIds]
    min_tokens: int
    grammar: str
    priority: int
    adapter: Adapter
    pooling: _inference_pb2.Pooling
    prefix_holder: PrefixHolder
    tenant: bytes
    turn: Turn
    processed_logprobs: bool
    watermark: Watermark
    retentions: _containers.RepeatedCompositeFieldContainer[PrefixRetention]
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., task: _Optional[_Union[Task, str]] = ..., token_ids: _Optional[_Iterable[int]] = ..., first_index: _Optional[int] = ..., max_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., cache_salt: _Optional[bytes] = ..., kv: _Optional[_Union[KvHandle, _Mapping]] = ..., num_choices: _Optional[int] = ..., first_choice: _Optional[int] = ..., beam_search: _Optional[_Union[_inference_pb2.BeamSearch, _Mapping]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., bad_words: _Optional[_Iterable[_Union[_inference_pb2.TokenIds, _Mapping]]] = ..., min_tokens: _Optional[int] = ..., grammar: _Optional[str] = ..., priority: _Optional[int] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ..., pooling: _Optional[_Union[_inference_pb2.Pooling, str]] = ..., prefix_holder: _Optional[_Union[PrefixHolder, _Mapping]] = ..., tenant: _Optional[bytes] = ..., turn: _Optional[_Union[Turn, str]] = ..., processed_logprobs: _Optional[bool] = ..., watermark: _Optional[_Union[Watermark, _Mapping]] = ..., retentions: _Optional[_Iterable[_Union[PrefixRetention, _Mapping]]] = ...) -> None: ...

class PrefixRetention(_message.Message):
    __slots__ = ("num_tokens", "seconds")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    seconds: int
    def __init__(self, num_tokens: _Optional[int] = ..., seconds: _Optional[int] = ...) -> None: ...

class Watermark(_message.Message):
    __slots__ = ("key", "gamma", "delta", "context_width")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_WIDTH_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    gamma: float
    delta: float
    context_width: int
    def __init__(self, key: _Optional[bytes] = ..., gamma: _Optional[float] = ..., delta: _Optional[float] = ..., context_width: _Optional[int] = ...) -> None: ...

class PrefixHolder(_message.Message):
    __slots__ = ("address", "num_tokens", "block_size")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    address: str
    num_tokens: int
    block_size: int
    def __init__(self, address: _Optional[str] = ..., num_tokens: _Optional[int] = ..., block_size: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id", "attempt", "choice")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    choice: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., choice: _Optional[int] = ...) -> None: ...

class Suspend(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class KvHandle(_message.Message):
    __slots__ = ("epoch", "transfer_id", "num_tokens", "layout", "endpoints", "computed_after", "last_reset")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_AFTER_FIELD_NUMBER: _ClassVar[int]
    LAST_RESET_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    transfer_id: bytes
    num_tokens: int
    layout: bytes
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    computed_after: int
    last_reset: int
    def __init__(self, epoch: _Optional[int] = ..., transfer_id: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., layout: _Optional[bytes] = ..., endpoints: _Optional[_Iterable[str]] = ..., computed_after: _Optional[int] = ..., last_reset: _Optional[int] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("outputs", "load", "stored_blocks", "evicted_blocks")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[Output]
    load: WorkerLoad
    stored_blocks: _containers.RepeatedScalarFieldContainer[bytes]
    evicted_blocks: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, outputs: _Optional[_Iterable[_Union[Output, _Mapping]]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., stored_blocks: _Optional[_Iterable[bytes]] = ..., evicted_blocks: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("request_id", "attempt", "choice", "admitted", "tokens", "kv_received", "failure", "suspended")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    SUSPENDED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    choice: int
    admitted: Admitted
    tokens: Tokens
    kv_received: KvReceived
    failure: Failure
    suspended: Suspended
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., choice: _Optional[int] = ..., admitted: _Optional[_Union[Admitted, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., kv_received: _Optional[_Union[KvReceived, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., suspended: _Optional[_Union[Suspended, _Mapping]] = ...) -> None: ...

class Suspended(_message.Message):
    __slots__ = ("kv",)
    KV_FIELD_NUMBER: _ClassVar[int]
    kv: KvHandle
    def __init__(self, kv: _Optional[_Union[KvHandle, _Mapping]] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("queue_seconds", "cached_tokens", "kv", "restore_seconds")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    RESTORE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    cached_tokens: int
    kv: KvHandle
    restore_seconds: float
    def __init__(self, queue_seconds: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., kv: _Optional[_Union[KvHandle, _Mapping]] = ..., restore_seconds: _Optional[float] = ...) -> None: ...

class KvReceived(_message.Message):
    __slots__ = ("transfer_bytes", "transfer_active_seconds", "transport")
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ACTIVE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    transfer_bytes: int
    transfer_active_seconds: float
    transport: str
    def __init__(self, transfer_bytes: _Optional[int] = ..., transfer_active_seconds: _Optional[float] = ..., transport: _Optional[str] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("first_index", "ids", "finish_reason", "prefill_seconds", "logprobs", "prompt_logprobs", "score", "num_draft_tokens", "num_accepted_tokens", "num_drafts", "embedding")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _inference_pb2.FinishReason
    prefill_seconds: float
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenScores]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenScores]
    score: float
    num_draft_tokens: int
    num_accepted_tokens: int
    num_drafts: int
    embedding: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, first_index: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., prefill_seconds: _Optional[float] = ..., logprobs: _Optional[_Iterable[_Union[TokenScores, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenScores, _Mapping]]] = ..., score: _Optional[float] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_drafts: _Optional[int] = ..., embedding: _Optional[_Iterable[float]] = ...) -> None: ...

class TokenScores(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs", "rank")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    rank: int
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., rank: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("kind", "message")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    kind: FailureKind
    message: str
    def __init__(self, kind: _Optional[_Union[FailureKind, str]] = ..., message: _Optional[str] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("num_waiting", "num_running", "waiting_tokens", "free_blocks", "cached_blocks", "owned_blocks", "leased_blocks", "reserved_blocks", "total_blocks", "step_seconds", "version", "draining", "prompt_token_seconds", "held_states")
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OWNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HELD_STATES_FIELD_NUMBER: _ClassVar[int]
    num_waiting: int
    num_running: int
    waiting_tokens: int
    free_blocks: int
    cached_blocks: int
    owned_blocks: int
    leased_blocks: int
    reserved_blocks: int
    total_blocks: int
    step_seconds: float
    version: int
    draining: bool
    prompt_token_seconds: float
    held_states: int
    def __init__(self, num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., owned_blocks: _Optional[int] = ..., leased_blocks: _Optional[int] = ..., reserved_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., step_seconds: _Optional[float] = ..., version: _Optional[int] = ..., draining: _Optional[bool] = ..., prompt_token_seconds: _Optional[float] = ..., held_states: _Optional[int] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "epoch", "role", "address", "kv_bytes_per_token", "block_size", "context_tokens", "load", "draining", "tp", "max_sequences", "mixed_chunk_tokens", "layout", "application", "tables", "state_bytes", "num_states", "has_sparse_points")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MIXED_CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    APPLICATION_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_STATES_FIELD_NUMBER: _ClassVar[int]
    HAS_SPARSE_POINTS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    role: Role
    address: str
    kv_bytes_per_token: int
    block_size: int
    context_tokens: int
    load: WorkerLoad
    draining: bool
    tp: int
    max_sequences: int
    mixed_chunk_tokens: int
    layout: bytes
    application: str
    tables: _containers.RepeatedCompositeFieldContainer[KvTable]
    state_bytes: int
    num_states: int
    has_sparse_points: bool
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., kv_bytes_per_token: _Optional[int] = ..., block_size: _Optional[int] = ..., context_tokens: _Optional[int] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., draining: _Optional[bool] = ..., tp: _Optional[int] = ..., max_sequences: _Optional[int] = ..., mixed_chunk_tokens: _Optional[int] = ..., layout: _Optional[bytes] = ..., application: _Optional[str] = ..., tables: _Optional[_Iterable[_Union[KvTable, _Mapping]]] = ..., state_bytes: _Optional[int] = ..., num_states: _Optional[int] = ..., has_sparse_points: _Optional[bool] = ...) -> None: ...

class KvTable(_message.Message):
    __slots__ = ("block_size", "window", "token_bytes")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    window: int
    token_bytes: int
    def __init__(self, block_size: _Optional[int] = ..., window: _Optional[int] = ..., token_bytes: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("info", "num_sessions", "num_leases", "num_transfers", "num_requests", "integrity_ok", "transports", "num_recomputed_tokens", "num_tasks", "num_draft_tokens", "num_accepted_tokens", "num_restored_tokens", "cpu_power_watts", "gpu_power_watts")
    class TransportsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    INFO_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_OK_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TASKS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESTORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CPU_POWER_WATTS_FIELD_NUMBER: _ClassVar[int]
    GPU_POWER_WATTS_FIELD_NUMBER: _ClassVar[int]
    info: WorkerInfo
    num_sessions: int
    num_leases: int
    num_transfers: int
    num_requests: int
    integrity_ok: bool
    transports: _containers.ScalarMap[str, str]
    num_recomputed_tokens: int
    num_tasks: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_restored_tokens: int
    cpu_power_watts: float
    gpu_power_watts: float
    def __init__(self, info: _Optional[_Union[WorkerInfo, _Mapping]] = ..., num_sessions: _Optional[int] = ..., num_leases: _Optional[int] = ..., num_transfers: _Optional[int] = ..., num_requests: _Optional[int] = ..., integrity_ok: _Optional[bool] = ..., transports: _Optional[_Mapping[str, str]] = ..., num_recomputed_tokens: _Optional[int] = ..., num_tasks: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_restored_tokens: _Optional[int] = ..., cpu_power_watts: _Optional[float] = ..., gpu_power_watts: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_seconds",)
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    timeout_seconds: float
    def __init__(self, timeout_seconds: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_requests",)
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    def __init__(self, num_requests: _Optional[int] = ...) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ("time",)
    TIME_FIELD_NUMBER: _ClassVar[int]
    time: int
    def __init__(self, time: _Optional[int] = ...) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: str
    def __init__(self, error: _Optional[str] = ...) -> None: ...

class SwitchRoleRequest(_message.Message):
    __slots__ = ("role", "timeout_seconds")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    role: Role
    timeout_seconds: float
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., timeout_seconds: _Optional[float] = ...) -> None: ...

class SwitchRoleResponse(_message.Message):
    __slots__ = ("num_requests", "error")
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    error: str
    def __init__(self, num_requests: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class RankControlRequest(_message.Message):
    __slots__ = ("call_id", "sequence_id", "num_plans", "join_group", "offer_kv", "kv_progress", "fetch_kv", "kv_target", "stop_kv", "load_adapter", "open_disk", "read_disk", "write_disk", "clear_disk")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PLANS_FIELD_NUMBER: _ClassVar[int]
    JOIN_GROUP_FIELD_NUMBER: _ClassVar[int]
    OFFER_KV_FIELD_NUMBER: _ClassVar[int]
    KV_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FETCH_KV_FIELD_NUMBER: _ClassVar[int]
    KV_TARGET_FIELD_NUMBER: _ClassVar[int]
    STOP_KV_FIELD_NUMBER: _ClassVar[int]
    LOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    OPEN_DISK_FIELD_NUMBER: _ClassVar[int]
    READ_DISK_FIELD_NUMBER: _ClassVar[int]
    WRITE_DISK_FIELD_NUMBER: _ClassVar[int]
    CLEAR_DISK_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    sequence_id: int
    num_plans: int
    join_group: JoinGroup
    offer_kv: KvTransfer
    kv_progress: KvProgress
    fetch_kv: KvTransfer
    kv_target: KvTransfer
    stop_kv: bool
    load_adapter: NumberedAdapter
    open_disk: OpenDisk
    read_disk: DiskBlocks
    write_disk: DiskBlocks
    clear_disk: bool
    def __init__(self, call_id: _Optional[int] = ..., sequence_id: _Optional[int] = ..., num_plans: _Optional[int] = ..., join_group: _Optional[_Union[JoinGroup, _Mapping]] = ..., offer_kv: _Optional[_Union[KvTransfer, _Mapping]] = ..., kv_progress: _Optional[_Union[KvProgress, _Mapping]] = ..., fetch_kv: _Optional[_Union[KvTransfer, _Mapping]] = ..., kv_target: _Optional[_Union[KvTransfer, _Mapping]] = ..., stop_kv: _Optional[bool] = ..., load_adapter: _Optional[_Union[NumberedAdapter, _Mapping]] = ..., open_disk: _Optional[_Union[OpenDisk, _Mapping]] = ..., read_disk: _Optional[_Union[DiskBlocks, _Mapping]] = ..., write_disk: _Optional[_Union[DiskBlocks, _Mapping]] = ..., clear_disk: _Optional[bool] = ...) -> None: ...

class NumberedAdapter(_message.Message):
    __slots__ = ("number", "adapter")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    number: int
    adapter: Adapter
    def __init__(self, number: _Optional[int] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class OpenDisk(_message.Message):
    __slots__ = ("folder", "role", "number", "max_bytes")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    folder: str
    role: str
    number: int
    max_bytes: int
    def __init__(self, folder: _Optional[str] = ..., role: _Optional[str] = ..., number: _Optional[int] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class DiskBlocks(_message.Message):
    __slots__ = ("hashes", "blocks")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, hashes: _Optional[_Iterable[bytes]] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class DiskChanges(_message.Message):
    __slots__ = ("stored", "evicted")
    STORED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    stored: _containers.RepeatedScalarFieldContainer[bytes]
    evicted: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, stored: _Optional[_Iterable[bytes]] = ..., evicted: _Optional[_Iterable[bytes]] = ...) -> None: ...

class JoinGroup(_message.Message):
    __slots__ = ("rank", "size", "store", "epoch", "timeout_seconds")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    size: int
    store: str
    epoch: int
    timeout_seconds: float
    def __init__(self, rank: _Optional[int] = ..., size: _Optional[int] = ..., store: _Optional[str] = ..., epoch: _Optional[int] = ..., timeout_seconds: _Optional[float] = ...) -> None: ...

class KvTransfer(_message.Message):
    __slots__ = ("kv", "prefix_hash", "num_cached", "tables", "state")
    KV_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    kv: KvHandle
    prefix_hash: bytes
    num_cached: int
    tables: _containers.RepeatedCompositeFieldContainer[BlockTable]
    state: int
    def __init__(self, kv: _Optional[_Union[KvHandle, _Mapping]] = ..., prefix_hash: _Optional[bytes] = ..., num_cached: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[BlockTable, _Mapping]]] = ..., state: _Optional[int] = ...) -> None: ...

class BlockTable(_message.Message):
    __slots__ = ("first", "blocks")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    first: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class KvProgress(_message.Message):
    __slots__ = ("num_ready", "num_ahead", "num_layers", "first_tokens", "first_logprobs")
    NUM_READY_FIELD_NUMBER: _ClassVar[int]
    NUM_AHEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    num_ready: int
    num_ahead: int
    num_layers: int
    first_tokens: _containers.RepeatedScalarFieldContainer[int]
    first_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, num_ready: _Optional[int] = ..., num_ahead: _Optional[int] = ..., num_layers: _Optional[int] = ..., first_tokens: _Optional[_Iterable[int]] = ..., first_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class RankControlResponse(_message.Message):
    __slots__ = ("call_id", "ready", "disk_changes", "done", "kv_received", "num_blocks", "reason", "error", "cancelled")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DISK_CHANGES_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    KV_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    ready: str
    disk_changes: DiskChanges
    done: bool
    kv_received: KvReceived
    num_blocks: int
    reason: str
    error: str
    cancelled: bool
    def __init__(self, call_id: _Optional[int] = ..., ready: _Optional[str] = ..., disk_changes: _Optional[_Union[DiskChanges, _Mapping]] = ..., done: _Optional[bool] = ..., kv_received: _Optional[_Union[KvReceived, _Mapping]] = ..., num_blocks: _Optional[int] = ..., reason: _Optional[str] = ..., error: _Optional[str] = ..., cancelled: _Optional[bool] = ...) -> None: ...
