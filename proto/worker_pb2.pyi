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
    TASK_WHOLE: _ClassVar[Task]
    TASK_PREFILL: _ClassVar[Task]
    TASK_DECODE: _ClassVar[Task]

class FailureKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_KIND_UNSPECIFIED: _ClassVar[FailureKind]
    FAILURE_KIND_INVALID: _ClassVar[FailureKind]
    FAILURE_KIND_FULL: _ClassVar[FailureKind]
    FAILURE_KIND_TRANSFER: _ClassVar[FailureKind]
    FAILURE_KIND_PREEMPTED: _ClassVar[FailureKind]
    FAILURE_KIND_WORKER: _ClassVar[FailureKind]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
TASK_UNSPECIFIED: Task
TASK_WHOLE: Task
TASK_PREFILL: Task
TASK_DECODE: Task
FAILURE_KIND_UNSPECIFIED: FailureKind
FAILURE_KIND_INVALID: FailureKind
FAILURE_KIND_FULL: FailureKind
FAILURE_KIND_TRANSFER: FailureKind
FAILURE_KIND_PREEMPTED: FailureKind
FAILURE_KIND_WORKER: FailureKind
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role

class SessionRequest(_message.Message):
    __slots__ = ("submit", "cancel")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    cancel: Cancel
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "attempt", "task", "token_ids", "first_index", "max_tokens", "sampling", "stop_token_ids", "ignore_eos", "cache_salt", "kv", "num_choices", "first_choice", "beam_search", "logprobs", "prompt_logprobs", "bad_words", "min_tokens", "grammar", "priority")
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
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., task: _Optional[_Union[Task, str]] = ..., token_ids: _Optional[_Iterable[int]] = ..., first_index: _Optional[int] = ..., max_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., cache_salt: _Optional[bytes] = ..., kv: _Optional[_Union[KvHandle, _Mapping]] = ..., num_choices: _Optional[int] = ..., first_choice: _Optional[int] = ..., beam_search: _Optional[_Union[_inference_pb2.BeamSearch, _Mapping]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., bad_words: _Optional[_Iterable[_Union[_inference_pb2.TokenIds, _Mapping]]] = ..., min_tokens: _Optional[int] = ..., grammar: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id", "attempt", "choice")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    choice: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., choice: _Optional[int] = ...) -> None: ...

class KvHandle(_message.Message):
    __slots__ = ("epoch", "transfer_id", "num_tokens", "layout", "endpoints")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    transfer_id: bytes
    num_tokens: int
    layout: bytes
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., transfer_id: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., layout: _Optional[bytes] = ..., endpoints: _Optional[_Iterable[str]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("outputs", "load", "cache")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[Output]
    load: Load
    cache: CacheChange
    def __init__(self, outputs: _Optional[_Iterable[_Union[Output, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., cache: _Optional[_Union[CacheChange, _Mapping]] = ...) -> None: ...

class CacheChange(_message.Message):
    __slots__ = ("stored", "evicted")
    STORED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    stored: _containers.RepeatedScalarFieldContainer[bytes]
    evicted: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, stored: _Optional[_Iterable[bytes]] = ..., evicted: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("request_id", "attempt", "choice", "admitted", "tokens", "joined", "failure")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    choice: int
    admitted: Admitted
    tokens: Tokens
    joined: Joined
    failure: Failure
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., choice: _Optional[int] = ..., admitted: _Optional[_Union[Admitted, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., joined: _Optional[_Union[Joined, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("queue_seconds", "cached_tokens", "kv")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    cached_tokens: int
    kv: KvHandle
    def __init__(self, queue_seconds: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., kv: _Optional[_Union[KvHandle, _Mapping]] = ...) -> None: ...

class Joined(_message.Message):
    __slots__ = ("transfer_bytes", "transfer_active_seconds", "cached_tokens", "transport")
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ACTIVE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    transfer_bytes: int
    transfer_active_seconds: float
    cached_tokens: int
    transport: str
    def __init__(self, transfer_bytes: _Optional[int] = ..., transfer_active_seconds: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., transport: _Optional[str] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("first_index", "ids", "finish_reason", "prefill_seconds", "logprobs", "prompt_logprobs", "score")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _inference_pb2.FinishReason
    prefill_seconds: float
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenScores]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenScores]
    score: float
    def __init__(self, first_index: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., prefill_seconds: _Optional[float] = ..., logprobs: _Optional[_Iterable[_Union[TokenScores, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenScores, _Mapping]]] = ..., score: _Optional[float] = ...) -> None: ...

class TokenScores(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("kind", "message")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    kind: FailureKind
    message: str
    def __init__(self, kind: _Optional[_Union[FailureKind, str]] = ..., message: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_waiting", "num_running", "waiting_tokens", "free_blocks", "cached_blocks", "owned_blocks", "leased_blocks", "reserved_blocks", "total_blocks", "step_seconds")
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
    def __init__(self, num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., owned_blocks: _Optional[int] = ..., leased_blocks: _Optional[int] = ..., reserved_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., step_seconds: _Optional[float] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "epoch", "role", "address", "kv_bytes_per_token", "block_size", "context_tokens", "load", "draining", "tp", "max_sequences", "mixed_chunk_tokens")
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
    worker_id: str
    epoch: int
    role: Role
    address: str
    kv_bytes_per_token: int
    block_size: int
    context_tokens: int
    load: Load
    draining: bool
    tp: int
    max_sequences: int
    mixed_chunk_tokens: int
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., kv_bytes_per_token: _Optional[int] = ..., block_size: _Optional[int] = ..., context_tokens: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., draining: _Optional[bool] = ..., tp: _Optional[int] = ..., max_sequences: _Optional[int] = ..., mixed_chunk_tokens: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("info", "num_sessions", "num_leases", "num_transfers", "num_jobs", "balanced", "transports")
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
    NUM_JOBS_FIELD_NUMBER: _ClassVar[int]
    BALANCED_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    info: WorkerInfo
    num_sessions: int
    num_leases: int
    num_transfers: int
    num_jobs: int
    balanced: bool
    transports: _containers.ScalarMap[str, str]
    def __init__(self, info: _Optional[_Union[WorkerInfo, _Mapping]] = ..., num_sessions: _Optional[int] = ..., num_leases: _Optional[int] = ..., num_transfers: _Optional[int] = ..., num_jobs: _Optional[int] = ..., balanced: _Optional[bool] = ..., transports: _Optional[_Mapping[str, str]] = ...) -> None: ...

class LeadRequest(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[RankCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[RankCommand, _Mapping]]] = ...) -> None: ...

class LeadResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[RankEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[RankEvent, _Mapping]]] = ...) -> None: ...

class RankCommand(_message.Message):
    __slots__ = ("join", "export", "progress", "complete", "fetch", "place", "stop")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    EXPORT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    join: Join
    export: Export
    progress: Progress
    complete: Complete
    fetch: Fetch
    place: Place
    stop: Stop
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., export: _Optional[_Union[Export, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., complete: _Optional[_Union[Complete, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ..., place: _Optional[_Union[Place, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ...) -> None: ...

class Join(_message.Message):
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

class Export(_message.Message):
    __slots__ = ("sequence_id", "transfer_id", "blocks", "num_tokens", "prefix_hash")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    transfer_id: bytes
    blocks: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: int
    prefix_hash: bytes
    def __init__(self, sequence_id: _Optional[int] = ..., transfer_id: _Optional[bytes] = ..., blocks: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[int] = ..., prefix_hash: _Optional[bytes] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("sequence_id", "num_ready", "num_ahead", "num_layers")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_READY_FIELD_NUMBER: _ClassVar[int]
    NUM_AHEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    num_ready: int
    num_ahead: int
    num_layers: int
    def __init__(self, sequence_id: _Optional[int] = ..., num_ready: _Optional[int] = ..., num_ahead: _Optional[int] = ..., num_layers: _Optional[int] = ...) -> None: ...

class Complete(_message.Message):
    __slots__ = ("sequence_id", "opening")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    opening: Opening
    def __init__(self, sequence_id: _Optional[int] = ..., opening: _Optional[_Union[Opening, _Mapping]] = ...) -> None: ...

class Opening(_message.Message):
    __slots__ = ("tokens", "logprobs")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("sequence_id", "kv", "prefix_hash")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    kv: KvHandle
    prefix_hash: bytes
    def __init__(self, sequence_id: _Optional[int] = ..., kv: _Optional[_Union[KvHandle, _Mapping]] = ..., prefix_hash: _Optional[bytes] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("sequence_id", "blocks", "num_cached")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    num_cached: int
    def __init__(self, sequence_id: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., num_cached: _Optional[int] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("sequence_id",)
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    def __init__(self, sequence_id: _Optional[int] = ...) -> None: ...

class RankEvent(_message.Message):
    __slots__ = ("ready", "fetched", "fetch_failed", "stopped")
    READY_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    FETCH_FAILED_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    ready: Ready
    fetched: Fetched
    fetch_failed: FetchFailed
    stopped: Stopped
    def __init__(self, ready: _Optional[_Union[Ready, _Mapping]] = ..., fetched: _Optional[_Union[Fetched, _Mapping]] = ..., fetch_failed: _Optional[_Union[FetchFailed, _Mapping]] = ..., stopped: _Optional[_Union[Stopped, _Mapping]] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("endpoint", "num_blocks")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    num_blocks: int
    def __init__(self, endpoint: _Optional[str] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class Fetched(_message.Message):
    __slots__ = ("sequence_id", "num_bytes", "active_seconds", "transport")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    num_bytes: int
    active_seconds: float
    transport: str
    def __init__(self, sequence_id: _Optional[int] = ..., num_bytes: _Optional[int] = ..., active_seconds: _Optional[float] = ..., transport: _Optional[str] = ...) -> None: ...

class FetchFailed(_message.Message):
    __slots__ = ("sequence_id",)
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    def __init__(self, sequence_id: _Optional[int] = ...) -> None: ...

class Stopped(_message.Message):
    __slots__ = ("sequence_id",)
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    def __init__(self, sequence_id: _Optional[int] = ...) -> None: ...
