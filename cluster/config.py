"""Reads the configuration of a service: a YAML file and flags in, a frozen tree of checked values
out.

Does not import Ray: the deployments (`app.py`) and the launcher (`launch.py`) read from it.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path, PurePath
from typing import Annotated, Any, Final, Literal, Self, cast, get_args

from pydantic import AfterValidator, BaseModel, Field, Strict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from ..proto.addresses import in_brackets, is_loopback
from ..proto.errors import InvalidArgument
from ..proto.limits import MAX_CONNECTIONS, MAX_CONNECTIONS_PER_ADDRESS, STALL_SECONDS
from ..router.adapters import MAX_ADAPTERS, AdapterName, LoraConfig
from ..router.auth.config import SECTION, AbsolutePath, AuthConfig, TlsConfig
from ..router.frontend.chat_formats import ReasoningParserName, ToolCallParserName
from ..router.resume.policy import RESUME_SECONDS
from ..router.scheduling.admission import QUEUE_SECONDS_HELP
from ..workers.engine.config import SpeculativeConfig, default_chunk_tokens
from .scaling.config import SERVE_CONFIG_ONLY, ScalingConfig
from .settings import NULL, split_aliases
from .text_files import read_yaml

STOP_MARGIN_SECONDS: Final = 2.0  # beyond grace_seconds, for a replica to stop


def _check_transport(name: str) -> str:
    """Returns the name of a transport of KV cache. Workers import it; here it need only be
    installed.
    """
    # Not imported from the registry of transports: that takes torch.
    known = [
        "shared",
        "gloo",
        "nccl",
        "nixl",
        *sorted(entry_points(group="tandem.kv_connectors").names),
    ]
    if name not in known:
        raise PydanticCustomError(
            "transport", "Name should be one of {known}", {"known": ", ".join(known)}
        )
    return name


Port = Annotated[int, Field(ge=0, le=65_535)]
Host = Annotated[str, Field(min_length=1, max_length=253), AfterValidator(in_brackets)]
Transports = Annotated[
    tuple[Annotated[str, AfterValidator(_check_transport)], ...], Field(max_length=8), Strict(False)
]
_Name = Annotated[str, Field(max_length=256, pattern=r"^(\*|[a-zA-Z0-9._-]+)$")]
_Origin = Annotated[str, Field(max_length=256, pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/ ]+)$")]
HostNames = Annotated[tuple[_Name, ...], Field(max_length=64), Strict(False)]
CorsOrigins = Annotated[tuple[_Origin, ...], Field(max_length=64), Strict(False)]
_REVISION: Final = r"^([\w.-]+/[\w.-]+)@.*"  # of a hub id
PoolRole = Literal["prefill", "decode"]
Quantization = Literal["int8", "int4", "fp8"]
KvCacheDtype = Literal["auto", "int8", "fp8"]
ModelImpl = Literal["auto", "tandem", "transformers"]
Resources = Annotated[dict[str, Annotated[float, Field(gt=0, le=1e6)]], Field(max_length=32)]
_LabelKey = Annotated[
    str, Field(max_length=317, pattern=r"^([a-z0-9.-]+/)?[a-zA-Z0-9]([\w.-]*[a-zA-Z0-9])?$")
]
_LabelValue = Annotated[str, Field(max_length=63, pattern=r"^[a-zA-Z0-9]([\w.-]*[a-zA-Z0-9])?$")]
Labels = Annotated[dict[_LabelKey, _LabelValue], Field(max_length=32)]


class PeerTlsConfig(BaseModel):
    """Configures TLS between routers, workers and ranks."""

    model_config = SECTION

    # cluster: certificates that are made when the service is launched; files: those named here.
    # None: plaintext if all nodes are loopback, else cluster.
    mode: Literal["none", "cluster", "files"] | None = None
    # PEM, read where `tandem serve` runs.
    ca: str | None = Field(default=None, min_length=1, max_length=4096)
    certificate: str | None = Field(default=None, min_length=1, max_length=4096)
    key: str | None = Field(default=None, min_length=1, max_length=4096)
    name: str = Field(
        default="tandem-peer", pattern=r"^[a-z0-9.-]{1,253}$"
    )  # for which the certificate is

    @model_validator(mode="after")
    def _has_its_files(self) -> Self:
        files = (self.ca, self.certificate, self.key)
        if self.mode == "files" and None in files:
            raise ValueError("peer_tls: mode files needs ca, certificate and key")
        if self.mode != "files" and files != (None, None, None):
            raise ValueError("peer_tls: ca, certificate and key need mode files")
        return self


class TracingConfig(BaseModel):
    """Configures where spans of requests go, over OTLP; needs the extra `otel`."""

    model_config = SECTION

    endpoint: Annotated[str, Field(max_length=2048, pattern=r"^https?://[^/ ]+")] | None = (
        None  # with /v1/traces
    )
    sample_ratio: float = Field(default=1.0, ge=0, le=1)  # of requests whose caller has not decided


class RouterConfig(BaseModel):
    """Configures the routers: how many, the ports of their API servers, the bounds of the queue,
    where they may run.
    """

    model_config = SECTION

    replicas: int | None = Field(
        default=None, ge=1, le=256
    )  # None: 1 on a local Ray, one a node on a cluster
    # The interface that the API servers bind. None: as all servers. Clients and the directory are
    # told the address that `host` gives, so with 0.0.0.0 it is that of the node, and loopback
    # reaches them, too.
    bind: Host | None = None
    # Ports of each router; 0 takes a free one. A router whose node has another router on them takes
    # the next ones.
    grpc_port: Port = 50_051
    http_port: Port = 8_080
    ops_port: Port = 9_464  # of /metrics, /live and /ready; if another program has it, any free one
    tls: TlsConfig | None = None  # None: in plaintext
    reflection: bool = False
    # Of gRPC responses, to clients that accept it. Token messages are small: compression costs more
    # time than it saves, except on slow links.
    compression: Literal["none", "gzip"] = "none"
    # A prompt of which a decode worker lacks no more may be computed there, if that is predicted to
    # be faster; 0 is never. So few tokens hide behind the weights that a decode step reads anyway,
    # or are two steps' chunks on CPUs.
    local_prefill_tokens: int = Field(default=64, ge=0, le=1_048_576)
    # Of waiting requests, and of their tokens: prompts, and what they are expected to generate.
    max_queued_requests: int = Field(default=1_024, ge=1, le=1_048_576)
    max_queued_tokens: int = Field(default=1_048_576, ge=1, le=1_073_741_824)
    max_queue_seconds: float = Field(
        default=30.0, ge=0.01, le=86_400, description=QUEUE_SECONDS_HELP
    )
    # How long a request that has lost its worker waits for one that can take it.
    park_seconds: float = Field(default=30.0, ge=0, le=3600)
    # How long a client may resume a stream after what it got of it last, here or at another router.
    resume_seconds: float = Field(default=RESUME_SECONDS, ge=1, le=86_400)
    # Names by which clients reach the status page and, where no key is needed, the HTTP server,
    # beside addresses and localhost; "*": any. Pages in browsers get in by DNS rebinding otherwise.
    host_names: HostNames = ()
    # Of pages that may use the HTTP server, such as https://chat.example.com; "*": any.
    cors_origins: CorsOrigins = ()
    # After how long without progress a client that does not read its stream is cut.
    stall_seconds: float = Field(default=STALL_SECONDS, ge=0.1, le=3600)
    # Of each API server. When there are too many, HTTP ends one without a request for a new one;
    # gRPC refuses new ones, and by address it bounds calls instead. Clients behind a proxy have one
    # address.
    max_connections: int = Field(default=MAX_CONNECTIONS, ge=1, le=1_048_576)
    max_connections_per_address: int = Field(
        default=MAX_CONNECTIONS_PER_ADDRESS, ge=1, le=1_048_576
    )
    num_cpus: float = Field(default=0.0, ge=0, le=1024)
    resources: Resources = {}
    labels: Labels = {}  # of the Ray nodes on which routers may run


class PoolConfig(BaseModel):
    """Configures one pool of workers: how many, how each is split, its budgets, and where it may
    run.
    """

    model_config = SECTION

    replicas: int = Field(default=1, ge=0, le=256)  # with `autoscaling` the fewest
    autoscaling: ScalingConfig | None = None  # None: always `replicas` workers
    tp: int = Field(default=1, ge=1, le=64)  # ranks of a worker, which share the model
    # Where the ranks of a worker may be: Ray's strategies for placement groups. STRICT_PACK is one
    # node.
    placement: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = "STRICT_PACK"
    num_threads: int | None = Field(
        default=None, ge=1, le=1024
    )  # of each rank; None shares its node's cores evenly
    block_size: int = Field(default=16, ge=1, le=1024)  # tokens
    kv_cache_gb: float = Field(
        default=1.0, ge=0.001, le=4096
    )  # GiB of each rank's memory; its heads of every token
    kv_host_gb: float = Field(
        default=0.0, ge=0, le=4096
    )  # GiB of each rank's host memory, for what leaves that cache
    # A folder on every node of the pool, and GiB of its disk for each worker, which keep KV cache
    # beyond a restart.
    kv_disk: AbsolutePath | None = None
    kv_disk_gb: float = Field(default=0.0, ge=0, le=1_048_576)
    # Of prompts, computed in one step. None is 2048, on CPUs 512, with one thread 128.
    chunk_tokens: int | None = Field(default=None, ge=1, le=1_048_576)
    # The same at most beside sequences that decode, which wait for it; with few a third. None is
    # 1024, on CPUs 40.
    mixed_chunk_tokens: int | None = Field(default=None, ge=1, le=1_048_576)
    max_sequences: int = Field(default=64, ge=1, le=65_536)
    num_cpus: float = Field(default=0.0, ge=0, le=1024)  # what a replica reserves in Ray
    resources: Resources = {}  # custom Ray resources of a replica
    labels: Labels = {}  # of the Ray nodes on which it may run

    @property
    def max_replicas(self) -> int:
        return self.replicas if self.autoscaling is None else self.autoscaling.max_replicas

    @property
    def num_ranks(self) -> int:
        """Returns the number of ranks of all workers, when there are most."""
        return self.max_replicas * self.tp


class TandemConfig(BaseModel):
    """Configures a whole service. `name` keeps two services apart on one Ray cluster."""

    model_config = SECTION

    model: str = Field(
        min_length=1, max_length=4096
    )  # a demo model's name, a local folder or a hub id
    served_model_name: str | None = Field(default=None, min_length=1, max_length=256)
    name: str = Field(default="tandem", pattern=r"^[a-z][a-z0-9-]{0,62}$")
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    quantization: Quantization | None = None  # of plain weights, when they are loaded
    kv_cache_dtype: KvCacheDtype = (
        "auto"  # auto: dtype; others have a scale for each token and KV head
    )
    device: Literal["cpu", "cuda"] = "cpu"
    # exact: a token's logits do not depend on batch and chunks, so that a stream which is computed
    # again after a fault goes on with the same tokens. CPUs always compute so where our kernels
    # run; on GPUs it takes slower kernels.
    numerics: Literal["exact", "fast"] = "fast"
    model_impl: ModelImpl = "auto"  # whose code computes; see docs/transformers.md
    generation_config: Literal["auto", "none"] = (
        "auto"  # auto: the model's own file has the defaults of requests
    )
    context_tokens: int | None = Field(
        default=None, ge=2, le=1_048_576
    )  # None takes the model's own
    prefix_caching: bool = True
    tool_call_parser: ToolCallParserName = "auto"  # by the chat template; as vLLM names them
    reasoning_parser: ReasoningParserName = "auto"
    speculative: SpeculativeConfig | None = None  # None: a step makes one token of a sequence
    # Transports of KV cache between workers, preferred to gRPC in this order; each two take the
    # first that both can use. None is shared memory (within a host) on CPUs, and only gRPC on GPUs
    # until NCCL has been measured on some.
    kv_transports: Transports | None = None
    lease_seconds: float = Field(default=30.0, ge=0.1, le=3600)
    grace_seconds: float = Field(
        default=3.0, ge=0, le=3600
    )  # that running streams have to end when the service stops
    start_seconds: float = Field(default=300.0, ge=1, le=86_400)  # how long a start may take
    # After how long without a heartbeat a rank is lost, and its worker with it. One that dies
    # breaks its connection and is noticed at once; one that is only paused, as with its virtual
    # machine, should not cost a reload.
    silence_seconds: float = Field(default=5.0, ge=0.5, le=3600)
    # After how long without progress an engine is taken to hang, and its worker is replaced.
    # Progress is a quarter of the model's layers in a step on CPUs, and a whole step on GPUs.
    # Compilation and warm-up come before.
    hang_seconds: float = Field(default=10.0, ge=1, le=3600)
    host: Host | None = (
        # that all servers bind; None: loopback on a local Ray, the node's address on a cluster
        None
    )
    # Serve's HTTP proxy (/-/healthz, the status page under /NAME). None: 8000, on a local Ray a
    # free one if need be.
    status_port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    dashboard: bool = False
    identity_file: AbsolutePath | None = (
        None  # of `tandem key identity`; None: made when the service is launched
    )
    metrics: bool = True  # False counts nothing, to measure what it costs
    log_format: Literal["text", "json"] = (
        "text"  # json: a line for each request, and the request's id in all lines
    )
    adapters: Annotated[
        dict[AdapterName, AbsolutePath], Field(max_length=MAX_ADAPTERS)
    ] = {}  # LoRA, folders by name
    lora: LoraConfig = LoraConfig()
    tracing: TracingConfig = TracingConfig()
    auth: AuthConfig = AuthConfig()
    peer_tls: PeerTlsConfig = PeerTlsConfig()
    router: RouterConfig = RouterConfig()
    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()

    @model_validator(mode="after")
    def _settings_go_together(self) -> Self:
        if self.decode.replicas < 1:
            raise ValueError("decode.replicas: must be at least 1, got 0")
        if self.identity_file is not None and self.peer_tls.mode is not None:
            raise ValueError(
                "peer_tls.mode: does not go with identity_file, which holds the certificates"
            )
        if self.quantization is not None and self.device == "cuda" and self.numerics == "exact":
            raise ValueError(
                "quantization: does not go with numerics exact on cuda, where it has no kernel for "
                "that"
            )
        if self.kv_cache_dtype != "auto" and self.device == "cuda":
            raise ValueError(
                f"kv_cache_dtype: {self.kv_cache_dtype} has kernels on cpu only, on cuda it must "
                "be auto"
            )
        for name in (self.served_name, *self.aliases):
            if name in self.adapters:
                raise ValueError(f"adapters.{name}: is the name of the model")
        for role, pool in self.pools.items():
            for setting in ("kv_host_gb", "kv_disk"):
                if getattr(pool, setting) and not self.prefix_caching:
                    raise ValueError(f"{role}.{setting}: needs prefix_caching")
            if (pool.kv_disk is None) != (pool.kv_disk_gb == 0):
                raise ValueError(f"{role}.kv_disk: goes with kv_disk_gb above 0, and that with it")
            if pool.autoscaling is not None:
                pool.autoscaling.check(role, pool.replicas)
        return self

    def check_sizes_are_fixed(self) -> None:
        """Raises InvalidArgument if a pool is to follow its load, for those who cannot do that."""
        if any(pool.autoscaling is not None for pool in self.pools.values()):
            raise InvalidArgument(SERVE_CONFIG_ONLY, "autoscaling")

    @property
    def served_name(self) -> str:
        """Returns the name under which the model is served."""
        name = PurePath(re.sub(_REVISION, r"\1", self.model)).name
        return self.served_model_name or name.removesuffix(".gguf")

    @property
    def aliases(self) -> tuple[str, ...]:
        """Returns the other names of the model: what the service was given, a folder's path or a
        hub id, as clients of other servers ask for it. Of a path both with and without the slash at
        its end.
        """
        given = dict.fromkeys(
            (self.model, self.model.rstrip("/"), re.sub(_REVISION, r"\1", self.model))
        )
        return tuple(name for name in given if name not in ("", self.served_name))

    @property
    def pools(self) -> dict[PoolRole, PoolConfig]:
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def num_workers(self) -> int:
        return self.prefill.replicas + self.decode.replicas

    @property
    def transports(self) -> tuple[str, ...]:
        return (
            (("shared",) if self.device == "cpu" else ())
            if self.kv_transports is None
            else self.kv_transports
        )

    def chunk_tokens(self, pool: PoolConfig, num_threads: int) -> int:
        return pool.chunk_tokens or default_chunk_tokens(self.device, num_threads * pool.tp)

    def mixed_chunk_tokens(self, pool: PoolConfig) -> int:
        return pool.mixed_chunk_tokens or (40 if self.device == "cpu" else 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOffer:
    """Describes what a node of the cluster has to offer."""

    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    def takes(self, section: RouterConfig | PoolConfig) -> bool:
        """Returns whether replicas of this section may run here."""
        has_resources = all(
            self.resources.get(name, 0) >= amount for name, amount in section.resources.items()
        )
        return has_resources and section.labels.items() <= self.labels.items()


def ranks_per_node(config: TandemConfig, pool: PoolConfig, nodes: Sequence[NodeOffer]) -> int:
    """Returns how many ranks of both pools may share a node that runs ranks of `pool`: the share of
    its cores that one rank may take is one in so many.

    Workers are expected to spread evenly over the nodes that their pool may have, the ranks of one
    worker to stay together unless its placement spreads them.
    """
    num_ranks = [0] * len(nodes)
    for each in (config.prefill, config.decode):
        together = 1 if "SPREAD" in each.placement else each.tp
        if eligible := [index for index, node in enumerate(nodes) if node.takes(each)]:
            for index in eligible:
                num_ranks[index] += -(-each.num_ranks // together // len(eligible)) * together
    return max(
        (num_ranks[index] for index, node in enumerate(nodes) if node.takes(pool)), default=1
    )


def check_interface(auth: AuthConfig, host: str) -> None:
    """Raises InvalidArgument if routers may not listen on this interface: without keys only
    loopback is safe.
    """
    if auth.keys_file is None and not auth.allow_anonymous and not is_loopback(host):
        raise InvalidArgument(
            f"{host} is not loopback, and whoever reaches it could use the service without a key; "
            "set auth.keys_file (--api-keys), or else auth.allow_anonymous (--allow-anonymous)",
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
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise InvalidArgument(f"{section}: must hold keys and values")
    tree[last] = value


def _line(entry: Mapping[str, Any]) -> str:
    """Returns one validation error as "dotted.key: what is wrong"."""
    path = tuple(entry["loc"])
    match entry["type"]:
        case "value_error":
            return str(entry["ctx"]["error"])
        case "missing":
            text = "missing"
        case "extra_forbidden":
            text = f"unknown key{_suggestion(path)}"
        case "dict_type" | "model_type":
            text = f"must hold keys and values, got {_shorten(entry['input'])}"
        case "tuple_type":
            text = f"must be a list, got {_shorten(entry['input'])}"
        case _:  # pydantic's "Input should be ..." or "String should have ...", with the bound
            text = f"{re.sub(r'^[A-Z][a-z]+ should', 'must', entry['msg'])}, got {_shorten(entry['input'])}"
    return f"{'.'.join(map(str, path))}: {text}"


def _shorten(value: object) -> str:
    return text if len(text := repr(value)) <= 80 else text[:77] + "..."


def _suggestion(path: tuple[int | str, ...]) -> str:
    section: type[BaseModel] = TandemConfig
    for part in path[:-1]:
        annotation = section.model_fields[str(part)].annotation
        section = next(
            kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)
        )
    close = difflib.get_close_matches(str(path[-1]), section.model_fields, n=1)
    return f"; did you mean {close[0]}?" if close else ""
