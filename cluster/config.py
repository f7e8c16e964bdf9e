"""Reads the configuration of a service from a YAML file and flags, as a frozen tree of values.

Does not import Ray: the deployments (`app.py`) and the launcher (`launch.py`) read from it.
One file because operators look up every value of the configuration here.
"""

import difflib
import os
import re
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path, PurePath
from typing import Annotated, Any, Final, Literal, Self, TypeGuard, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    Strict,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ..proto.addresses import in_brackets, is_loopback
from ..proto.errors import InvalidArgument
from ..proto.limits import (
    KEEPALIVE_SECONDS,
    MAX_CONNECTIONS,
    MAX_CONNECTIONS_PER_ADDRESS,
    MAX_TOKENS,
    STALL_SECONDS,
)
from ..router.adapters import MAX_ADAPTERS, AdapterName, LoraConfig
from ..router.api.dialect import ReasoningField
from ..router.auth.config import SECTION, AbsolutePath, AuthConfig
from ..router.auth.tls import TlsConfig
from ..router.fields import error_text, matching, shorten
from ..router.resume.policy import RESUME_SECONDS
from ..router.scheduling.admission import QUEUE_SECONDS_HELP
from ..router.slo import ClassName, SloClass
from ..router.storage.config import StorageConfig
from ..router.watermark.config import WatermarkConfig
from ..workers.engine.config import SpeculativeConfig, default_chunk_tokens
from .chat_template import ChatTemplate
from .parser_names import ReasoningParser, ToolCallParser
from .request_defaults import SamplingDefaults, TemplateKwargs
from .scaling.config import SERVE_CONFIG_ONLY, RoleScaling, RoleScalingConfig, ScalingConfig
from .settings import NULL, split_aliases
from .text_files import read_yaml

STOP_MARGIN_SECONDS: Final = 2.0  # a replica has this time beyond grace_seconds to stop
_HOST_UTILIZATION: Final = 0.25  # of a host's memory, for KV cache of a default size


# The devices whose KV cache each moves. Not from the registry of transports, which imports torch.
_BUILT_IN_TRANSPORTS: Final = {
    "shared": ("cpu",),
    "ipc": ("cuda",),
    "gloo": ("cpu", "cuda"),
    "nccl": ("cuda",),
    "nixl": ("cpu",),
}


def _check_transport(name: str) -> str:
    """Returns the name of an installed transport of KV cache, which workers import."""
    known = list(_BUILT_IN_TRANSPORTS)
    known += sorted(entry_points(group="tandem.kv_connectors").names)
    if name not in known:
        raise PydanticCustomError(
            "transport", "Name should be one of {known}", {"known": ", ".join(known)}
        )
    return name


def _listed(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _with_a_name(model: str) -> str:
    """Makes a path absolute that does not name its own folder, such as `.` and `../..`."""
    return os.path.realpath(model) if PurePath(model).name in ("", "..") else model


ServedNames = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=256)], ...],
    Field(min_length=1, max_length=16),
    Strict(False),
    BeforeValidator(_listed),
]
"""A name, or a list of names."""

Port = Annotated[int, Field(ge=0, le=65_535)]
Host = Annotated[str, Field(min_length=1, max_length=253), AfterValidator(in_brackets)]
Transports = Annotated[
    tuple[Annotated[str, AfterValidator(_check_transport)], ...], Field(max_length=8), Strict(False)
]
_HostName = Annotated[
    str, matching(r"\*|[a-zA-Z0-9._-]{1,256}", "a host name without a port, or * for all")
]
_Origin = Annotated[
    str,
    Field(max_length=256),
    matching(
        r"\*|[a-z][a-z0-9+.-]*://[^/ ]+", "an origin such as https://example.com, or * for all"
    ),
]
HostNames = Annotated[tuple[_HostName, ...], Field(max_length=64), Strict(False)]
CorsOrigins = Annotated[tuple[_Origin, ...], Field(max_length=64), Strict(False)]
_REVISION: Final = r"^([\w.-]+/[\w.-]+)@.*"  # of a hub id
PoolRole = Literal["prefill", "decode"]
_NUMBERS: Final = ("dtype", "quantization", "kv_cache_dtype", "numerics")
Quantization = Literal["int8", "int4", "fp8"]
KvCacheDtype = Literal["auto", "int8", "fp8", "int4"]
Numerics = Literal["exact", "fast"]
ModelImpl = Literal["auto", "tandem", "transformers"]
Resources = Annotated[dict[str, Annotated[float, Field(gt=0, le=1e6)]], Field(max_length=32)]
_LABEL: Final = r"[a-zA-Z0-9]([\w.-]*[a-zA-Z0-9])?"
_LABEL_WORDS: Final = "letters, digits, '-', '_' and '.', with a letter or digit at both ends"
_LabelKey = Annotated[
    str,
    Field(max_length=317),
    matching(rf"([a-z0-9.-]+/)?{_LABEL}", f"{_LABEL_WORDS}, after a domain and '/' if any"),
]
_LabelValue = Annotated[str, Field(max_length=63), matching(_LABEL, _LABEL_WORDS)]
Labels = Annotated[dict[_LabelKey, _LabelValue], Field(max_length=32)]


class PeerTlsConfig(BaseModel):
    """Configures TLS between routers, workers and ranks."""

    model_config = SECTION

    # cluster: certificates are made when the service is launched. files: the files named here.
    # None: plaintext if all nodes are loopback, otherwise cluster.
    mode: Literal["none", "cluster", "files"] | None = None
    # PEM files, read where `tandem serve` runs.
    ca: str | None = Field(default=None, min_length=1, max_length=4096)
    certificate: str | None = Field(default=None, min_length=1, max_length=4096)
    key: str | None = Field(default=None, min_length=1, max_length=4096)
    # The host name in the certificate.
    name: Annotated[
        str, matching(r"[a-z0-9.-]{1,253}", "a host name of lowercase letters, digits, '-' and '.'")
    ] = "tandem-peer"

    @model_validator(mode="after")
    def _has_its_files(self) -> Self:
        files = (self.ca, self.certificate, self.key)
        if self.mode == "files" and None in files:
            raise ValueError("peer_tls: mode: files needs ca, certificate and key")
        if self.mode != "files" and files != (None, None, None):
            raise ValueError("peer_tls: ca, certificate and key need mode: files")
        return self


class TracingConfig(BaseModel):
    """Configures the export of request spans over OTLP; needs the extra `otel`."""

    model_config = SECTION

    # The whole URL, with /v1/traces.
    endpoint: (
        Annotated[
            str,
            Field(max_length=2048),
            matching(r"https?://[^/ ]+.*", "a URL that begins with http:// or https://"),
        ]
        | None
    ) = None
    # Of requests whose caller has not decided.
    sample_ratio: float = Field(default=1.0, ge=0, le=1)


class RouterConfig(BaseModel):
    """Configures the routers: their number, ports, queue bounds, connections and nodes."""

    model_config = SECTION

    # None: 1 on a local Ray, one for each node on a cluster.
    replicas: int | None = Field(default=None, ge=1, le=256)
    # The interface that the API servers bind; None: `host`. Clients and the directory get the
    # address that follows from `host`: with `bind` 0.0.0.0 the node's address, and loopback works
    # beside it.
    bind: Host | None = None
    # Ports of each router; 0 takes a free one. If another router of the node has these ports, the
    # router takes the next ones.
    grpc_port: Port = 50_051
    http_port: Port = 8_080
    # Of /metrics, /live and /ready. If another program has the port, the router takes a free one.
    ops_port: Port = 9_464
    tls: TlsConfig | None = None  # None: plaintext
    reflection: bool = False
    # Of gRPC responses, for clients that accept it. Token messages are small: compression costs
    # more time than it saves, except on slow links.
    compression: Literal["none", "gzip"] = "none"
    # A decode worker that lacks at most this number of a prompt's tokens may compute them, if that
    # is predicted to be faster; 0: never. A small chunk hides behind the weights that a decode
    # step reads anyway; on CPUs 64 tokens are the chunks of two steps.
    local_prefill_tokens: int = Field(default=64, ge=0, le=1_048_576)
    # Bounds of waiting requests, and of their tokens: prompts plus expected completions.
    max_queued_requests: int = Field(default=1_024, ge=1, le=1_048_576)
    max_queued_tokens: int = Field(default=1_048_576, ge=1, le=1_073_741_824)
    max_queue_seconds: float = Field(
        default=30.0, ge=0.01, le=86_400, description=QUEUE_SECONDS_HELP
    )
    # The time that a request whose worker was lost waits for another worker.
    park_seconds: float = Field(default=30.0, ge=0, le=3600)
    # The time after the last received message in which a client may resume a stream, at any router.
    resume_seconds: float = Field(default=RESUME_SECONDS, ge=1, le=86_400)
    # Host names, beside addresses and localhost, by which clients reach the status page and, in a
    # service without keys, the HTTP server; "*": any. They keep out pages that use DNS rebinding.
    host_names: HostNames = ()
    # Origins of pages that may use the HTTP server, such as https://chat.example.com; "*": any.
    cors_origins: CorsOrigins = ()
    # A client that does not read its stream is disconnected after this time without progress.
    stall_seconds: float = Field(default=STALL_SECONDS, ge=0.1, le=3600)
    # An HTTP stream that has sent no bytes for this time, because its request waits or a tool call
    # is not complete, sends a keep-alive, so that no proxy and no client gives it up. None: never.
    keepalive_seconds: float | None = Field(default=KEEPALIVE_SECONDS, ge=1, le=3600)
    # Of messages and deltas in answers to chats; some clients show the text twice if both are set.
    reasoning_field: ReasoningField = "reasoning_content"
    # ignore: unknown fields at the top of a body are left out, and a header lists them.
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    # Of each API server. At the bound, HTTP closes an idle connection for a new one, and gRPC
    # refuses new ones. For an address gRPC bounds calls instead of connections. Clients behind a
    # proxy share one address.
    max_connections: int = Field(default=MAX_CONNECTIONS, ge=1, le=1_048_576)
    max_connections_per_address: int = Field(
        default=MAX_CONNECTIONS_PER_ADDRESS, ge=1, le=1_048_576
    )
    # A file on each router's node that gets a line for each request, in Mooncake's form: its time,
    # its lengths and the hashes of its prompt's blocks, never its text.
    trace_file: AbsolutePath | None = None
    trace_max_mb: float = Field(default=1_000.0, ge=0.001, le=1_000_000)  # then it gets no more
    trace_block_tokens: int = Field(default=512, ge=1, le=1_048_576)  # Mooncake's blocks have 512
    # Of the hashes. None: derived from the identity, which is a new one at each start of a service
    # without `identity_file`.
    trace_salt: str | None = Field(default=None, min_length=16, max_length=256)
    trace_tenants: bool = False  # with the tenant of each request
    num_cpus: float = Field(default=0.0, ge=0, le=1024)
    resources: Resources = {}
    labels: Labels = {}  # of the Ray nodes on which routers may run

    @model_validator(mode="after")
    def _servers_have_their_own_ports(self) -> Self:
        if self.grpc_port and self.grpc_port == self.http_port:
            raise ValueError(f"router.http_port: must differ from grpc_port, {self.grpc_port}")
        return self


class PoolConfig(BaseModel):
    """Configures one pool of workers: their number, ranks, budgets and nodes."""

    model_config = SECTION

    replicas: int = Field(default=1, ge=0, le=256)  # with `autoscaling` the minimum
    autoscaling: ScalingConfig | None = None  # None: always `replicas` workers
    tp: int = Field(default=1, ge=1, le=64)  # ranks of a worker, which share the model
    # Ray's strategy for the nodes of a worker's ranks; STRICT_PACK: one node.
    placement: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = "STRICT_PACK"
    # Of each rank; None: an equal share of its node's cores.
    num_threads: int | None = Field(default=None, ge=1, le=1024)
    block_size: int = Field(default=16, ge=1, le=1024)  # tokens
    # GPUs of each rank; below 1 for ranks that share a GPU, as 0.5 for two of them.
    num_gpus: float = Field(default=1.0, ge=0.01, le=1)
    # The part of a rank's share of its GPU's memory that the rank may use: for weights,
    # activations, CUDA graphs and KV cache.
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    # GiB of each rank's memory, which holds the rank's heads of every token. None: on GPUs the rest
    # of that part, as measured; on CPUs 1, but at most the rank's share of a quarter of the memory.
    kv_cache_gb: float | None = Field(default=None, ge=0.001, le=4096)
    # GiB of each rank's host memory, for blocks and states that leave that cache.
    kv_host_gb: float = Field(default=0.0, ge=0, le=4096)
    # States in that cache, of a model that keeps states. None: at most half of its bytes, and four
    # for each of max_sequences.
    state_slots: int | None = Field(default=None, ge=1, le=1_048_576)
    # A folder on every node of the pool, and GiB of its disk for each worker; they keep KV cache
    # beyond a restart.
    kv_disk: AbsolutePath | None = None
    kv_disk_gb: float = Field(default=0.0, ge=0, le=1_048_576)
    # Prompt tokens in one step. None: 2048, on CPUs 512, with one thread 128.
    chunk_tokens: int | None = Field(default=None, ge=1, le=1_048_576)
    # The maximum of prompt tokens in a step with decodes, which wait for them; with few sequences a
    # third. None: 1024, on CPUs 40.
    mixed_chunk_tokens: int | None = Field(default=None, ge=1, le=1_048_576)
    # The maximum time of a step with decodes and prompts, divided by the measured time of a step
    # without prompts. None: only the limits in tokens count. Without a prefill pool, bursts of
    # prompts exceed this limit and mixed_chunk_tokens; see `Budgets.prompt_tokens`.
    mixed_step_factor: float | None = Field(default=2.0, gt=1, le=100)
    # In one batch. None: 256, on CPUs 64.
    max_sequences: int | None = Field(default=None, ge=1, le=65_536)
    num_cpus: float = Field(default=0.0, ge=0, le=1024)  # that a replica reserves in Ray
    resources: Resources = {}  # custom Ray resources of a replica
    labels: Labels = {}  # of the Ray nodes on which a replica may run

    @property
    def max_replicas(self) -> int:
        return self.replicas if self.autoscaling is None else self.autoscaling.max_replicas

    @property
    def num_ranks(self) -> int:
        """Returns the number of ranks of the maximum of workers."""
        return self.max_replicas * self.tp


class TandemConfig(BaseModel):
    """Configures a whole service. `name` keeps two services apart on one Ray cluster."""

    model_config = SECTION

    # A built-in model's name, a local folder, a GGUF file or a hub id.
    model: Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_with_a_name)]
    served_model_name: ServedNames | None = None  # answers have the first name
    name: Annotated[
        str,
        matching(
            r"[a-z][a-z0-9-]{0,62}",
            "1 to 63 lowercase letters, digits and hyphens, with a letter first",
        ),
    ] = "tandem"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    # Of weights that are not quantized in the checkpoint, when they are loaded.
    quantization: Quantization | None = None
    # auto: dtype. The others have a scale for each token and KV head.
    kv_cache_dtype: KvCacheDtype = "auto"
    device: Literal["cpu", "cuda"] = "cpu"
    # exact: a token's logits do not depend on batch and chunks, so a stream that is computed again
    # after a fault continues with the same tokens. Our kernels for CPUs are always exact; on GPUs
    # exact kernels are slower.
    numerics: Numerics = "fast"
    model_impl: ModelImpl = "auto"  # the code that computes; see docs/transformers.md
    # auto: defaults of requests come from the model's generation_config.json.
    generation_config: Literal["auto", "none"] = "auto"
    sampling_defaults: SamplingDefaults = {}  # of requests; they win over that file
    context_tokens: int | None = Field(
        default=None, ge=2, le=MAX_TOKENS
    )  # None: the model's context
    prefix_caching: bool = True
    # With vLLM's names; auto finds the parser in the chat template.
    tool_call_parser: ToolCallParser = "auto"
    reasoning_parser: ReasoningParser = "auto"
    # In place of the model's: the text, a file that is read where the configuration is, or a name.
    chat_template: ChatTemplate | None = None
    chat_template_kwargs: TemplateKwargs = {}  # for requests that do not set them
    speculative: SpeculativeConfig | None = None  # None: a step makes one token of a sequence
    # Transports of KV cache between workers, preferred to gRPC in this order; two workers use the
    # first that both have. None: shared memory on CPUs and CUDA IPC on GPUs, both within a host.
    kv_transports: Transports | None = None
    lease_seconds: float = Field(default=30.0, ge=0.1, le=3600)
    # The time in which running streams may end when the service stops.
    grace_seconds: float = Field(default=3.0, ge=0, le=3600)
    start_seconds: float = Field(default=300.0, ge=1, le=86_400)  # the maximum for a start
    # After this time without a heartbeat a rank is lost, and its worker with it. A dead rank is
    # noticed at once by its broken connection; a rank that is only paused, as with its virtual
    # machine, should not cost a reload.
    silence_seconds: float = Field(default=5.0, ge=0.5, le=3600)
    # After this time without progress an engine is considered to hang, and its worker is replaced.
    # Progress is a quarter of the model's layers in a step on CPUs, and a whole step on GPUs. The
    # time for compilation and warm-up does not count.
    hang_seconds: float = Field(default=10.0, ge=1, le=3600)
    # The interface that all servers bind; None: loopback on a local Ray, the node's address on a
    # cluster.
    host: Host | None = None
    # Of Serve's HTTP proxy (/-/healthz, the status page at /NAME). None: 8000, or on a local Ray a
    # free port if 8000 is taken.
    status_port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    dashboard: bool = False
    # A file of `tandem key identity`; None: an identity is made when the service is launched.
    identity_file: AbsolutePath | None = None
    metrics: bool = True  # False counts nothing, to measure the cost of counting
    # json: a line for each request, and the request's id in all lines.
    log_format: Literal["text", "json"] = "text"
    # Folders of LoRA adapters, by name.
    adapters: Annotated[dict[AdapterName, AbsolutePath], Field(max_length=MAX_ADAPTERS)] = {}
    lora: LoraConfig = LoraConfig()
    tracing: TracingConfig = TracingConfig()
    # By name; requests name their class by `service_tier`, the others have the class `default`.
    slo: Annotated[dict[ClassName, SloClass], Field(max_length=16)] = {}
    auth: AuthConfig = AuthConfig()
    watermark: WatermarkConfig = WatermarkConfig()
    peer_tls: PeerTlsConfig = PeerTlsConfig()
    storage: StorageConfig = StorageConfig()
    role_scaling: RoleScalingConfig | None = None  # None: roles change only by `tandem role`
    router: RouterConfig = RouterConfig()
    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()

    @model_validator(mode="after")
    def _settings_go_together(self) -> Self:
        if self.decode.replicas < 1:
            raise ValueError("decode.replicas: must be at least 1, got 0")
        if self.identity_file is not None and self.peer_tls.mode is not None:
            raise ValueError(
                "peer_tls.mode: cannot be set together with identity_file, which holds the "
                "certificates"
            )
        if self.quantization is not None and self.device == "cuda":
            if self.quantization == "int8":
                # Without a kernel, a step would restore all weights: 70 ms for 8 billion of them.
                raise ValueError(
                    "quantization: int8 has kernels on cpu only; on cuda use fp8 or int4, or serve "
                    "a checkpoint with quantized weights"
                )
            if self.numerics == "exact":
                raise ValueError(
                    f"quantization: {self.quantization} on cuda needs numerics: fast; its sums "
                    "depend on the batch"
                )
        devices = [_BUILT_IN_TRANSPORTS.get(name, (self.device,)) for name in self.transports]
        if devices and not any(self.device in each for each in devices):
            raise ValueError(
                f"kv_transports: {', '.join(self.transports)} cannot move KV cache on "
                f"{self.device}; leave it out, or give [] for gRPC alone"
            )
        for name in (*self.served_names, *self.aliases):
            if name in self.adapters:
                raise ValueError(f"adapters.{name}: the model has this name; choose another one")
        for role, pool in self.pools.items():
            for setting in ("kv_host_gb", "kv_disk"):
                if getattr(pool, setting) and not self.prefix_caching:
                    raise ValueError(f"{role}.{setting}: needs prefix_caching: true")
            if (pool.kv_disk is None) != (pool.kv_disk_gb == 0):
                raise ValueError(f"{role}.kv_disk: must be set together with kv_disk_gb above 0")
            if pool.tp > 1 and pool.num_gpus != 1:
                raise ValueError(
                    f"{role}.num_gpus: must be 1 with tp above 1, got {pool.num_gpus:g}: NCCL "
                    "refuses two ranks of a worker on one GPU"
                )
            if pool.autoscaling is not None:
                pool.autoscaling.check(role, pool.replicas)
        if self.role_scaling is not None:
            self.role_scaling.check(self.prefill.replicas, self.decode.replicas)
        return self

    def check_sizes_are_fixed(self) -> None:
        """Raises InvalidArgument if a pool has autoscaling, which not every launcher supports."""
        if any(pool.autoscaling is not None for pool in self.pools.values()):
            raise InvalidArgument(SERVE_CONFIG_ONLY, "autoscaling")

    @property
    def adapter_folders(self) -> tuple[str, ...]:
        """Returns the folders in which, and below which, workers accept adapters."""
        return (*self.adapters.values(), *filter(None, [self.lora.folder]))

    @property
    def served_name(self) -> str:
        """Returns the name of the model in answers."""
        return self.served_names[0]

    @property
    def served_names(self) -> tuple[str, ...]:
        """Returns the listed names under which the model is served."""
        name = PurePath(re.sub(_REVISION, r"\1", self.model)).name
        return self.served_model_name or (name.removesuffix(".gguf"),)

    @property
    def aliases(self) -> tuple[str, ...]:
        """Returns the other names of the model, which clients of other servers use.

        These are the path or the hub id in `model`; a path with and without the slash at its end.
        """
        given = dict.fromkeys(
            (self.model, self.model.rstrip("/"), re.sub(_REVISION, r"\1", self.model))
        )
        return tuple(name for name in given if name not in ("", *self.served_names))

    @property
    def pools(self) -> dict[PoolRole, PoolConfig]:
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def num_workers(self) -> int:
        return self.prefill.replicas + self.decode.replicas

    @property
    def scaled_roles(self) -> RoleScaling | None:
        """Returns the settings by which the directory chooses roles; None if it does not choose."""
        if self.role_scaling is None:
            return None
        return RoleScaling(
            config=self.role_scaling,
            num_prefill=self.prefill.replicas,
            num_workers=self.num_workers,
        )

    @property
    def transports(self) -> tuple[str, ...]:
        if self.kv_transports is not None:
            return self.kv_transports
        return ("shared",) if self.device == "cpu" else ("ipc",)

    def chunk_tokens(self, pool: PoolConfig, num_threads: int) -> int:
        return pool.chunk_tokens or default_chunk_tokens(self.device, num_threads * pool.tp)

    def mixed_chunk_tokens(self, pool: PoolConfig) -> int:
        return pool.mixed_chunk_tokens or (40 if self.device == "cpu" else 1024)

    def max_sequences(self, pool: PoolConfig) -> int:
        return pool.max_sequences or (64 if self.device == "cpu" else 256)

    def memory_share(self, pool: PoolConfig, ranks_per_node: int) -> tuple[float, float]:
        """Returns a rank's share of its GPU or host, and the part of that share to use.

        The product with the memory of the GPU or the host is what the rank may use. On CPUs this is
        for the KV cache alone.
        """
        if self.device == "cpu":
            return 1 / ranks_per_node, _HOST_UTILIZATION
        return pool.num_gpus, pool.gpu_memory_utilization


def check_interface(auth: AuthConfig, host: str) -> None:
    """Raises InvalidArgument if routers may not listen on this interface.

    Without keys only loopback is safe.
    """
    if not auth.needs_key and not auth.allow_anonymous and not is_loopback(host):
        raise InvalidArgument(
            f"{host} is not loopback: everybody who reaches it could use the service without a "
            "key; set auth.keys_file (--api-keys) or auth.allow_anonymous (--allow-anonymous)",
            "host",
        )


def load_config(
    path: Path | None = None, overrides: Mapping[str, object] | None = None
) -> TandemConfig:
    """Reads a YAML file, if one is named, and applies `overrides` to it.

    The file may have vLLM's names of settings at its top level. The keys of `overrides` are dotted;
    None leaves the file's value, and NULL puts a null in its place.

    Raises InvalidArgument; its text has one line for each wrong value, naming its key and the
    bound.
    """
    tree, aliases = split_aliases(
        {} if path is None else read_yaml(path), TandemConfig.model_fields
    )
    for key, value in (*aliases.items(), *(overrides or {}).items()):
        if value is not None:
            _put(tree, key, None if value is NULL else value)
    try:
        return TandemConfig.model_validate(tree)
    except ValidationError as error:
        raise InvalidArgument(
            "\n".join(_line(cast(Mapping[str, Any], entry)) for entry in error.errors())
        ) from None


def _put(tree: dict[str, Any], key: str, value: object) -> None:
    *sections, last = key.split(".")
    for section in sections:
        if tree.get(section) is None:  # absent, or null as in `speculative: null`
            tree[section] = {}
        tree = tree[section]
        if not isinstance(tree, dict):
            raise InvalidArgument(f"{section}: must hold keys and values")
    tree[last] = value


def _line(entry: Mapping[str, Any]) -> str:
    """Returns one validation error as "dotted.key: reason"."""
    path = tuple(entry["loc"])
    match entry["type"]:
        case "value_error":
            text = error_text(entry)
            if not path or text.startswith(str(path[0])):  # it names its key
                return text
        case "missing":
            text = error_text(entry)
            if path == ("model",):
                text += "; give a built-in name (`tandem model list`), a folder or a hub id"
        case "extra_forbidden":
            text = _same_in_pools(path) or f"{error_text(entry)}{_suggestion(path)}"
        case "dict_type" | "model_type":
            text = f"must hold keys and values, got {shorten(entry['input'])}"
        case "tuple_type":
            text = f"must be a list, got {shorten(entry['input'])}"
        case _:
            text = f"{error_text(entry)}, got {shorten(entry['input'])}"
    return f"{'.'.join(map(str, path))}: {text}"


def _same_in_pools(path: tuple[int | str, ...]) -> str:
    """Returns why a pool cannot have a setting that decides its numbers, else an empty text."""
    if path[0] not in get_args(PoolRole) or path[1:] not in [(name,) for name in _NUMBERS]:
        return ""
    return (
        f"must be the same in both pools, set {path[1]} without the pool: after a fault, the "
        "decode pool computes a prompt again, and with other numbers a stream could continue with "
        "other tokens"
    )


def _is_section(kind: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _suggestion(path: tuple[int | str, ...]) -> str:
    section: type[BaseModel] = TandemConfig
    for part in path[:-1]:
        field = section.model_fields.get(str(part))
        kinds = (field.annotation, *get_args(field.annotation)) if field else ()
        # The name of an entry, as of an SLO class, leads to no other section.
        section = next((kind for kind in kinds if _is_section(kind)), section)
    close = difflib.get_close_matches(str(path[-1]), section.model_fields, n=1)
    return f"; did you mean {close[0]}?" if close else ""
