"""Lists the settings of a service that flags and arguments name, in our words and in vLLM's.

`tandem serve` makes its options of SETTINGS, `LLM` and the YAML file read vLLM's names by it.
docs/from-vllm.md describes both. A value is checked by the configuration, not here.

One file because a reader looks up a name in one table.
"""

import json
import logging
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from ..proto.errors import InvalidArgument
from .given_keys import hash_given_keys

_log = logging.getLogger(__name__)

NULL: Final = object()
"""In overrides of a configuration: puts a null in the place of the file's value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Describes one setting. Names are written as in Python, without the hyphens of a flag."""

    name: str
    help: str
    # Dotted keys of the configuration, which all get the value. `LLM` sets the last one alone: its
    # worker is of the decode pool.
    keys: tuple[str, ...]
    vllm: tuple[str, ...] = ()
    kind: type = str
    has_negation: bool = True  # of a bool: there is a flag --no-NAME
    # Returns the overrides for a value; None puts the value at all keys.
    convert: Callable[[Any], Mapping[str, object]] | None = None

    def overrides(self, value: Any) -> Mapping[str, object]:
        """Returns dotted keys of the configuration with their values. Raises InvalidArgument."""
        if self.convert is not None:
            return self.convert(value)
        return dict.fromkeys(self.keys, str(value) if isinstance(value, Path) else value)


def _speculative(value: Any) -> Mapping[str, object]:
    """Reads ngram, draft=MODEL or, as in vLLM, the whole section, which may be JSON."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            raise InvalidArgument(f"must be JSON, got {value[:80]!r}", "speculative") from None
    if not isinstance(value, str):
        return {"speculative": value}
    method, separator, model = value.partition("=")
    return {
        "speculative.method": "draft_model" if method == "draft" else method,
        # ngram has no model, also if the file names one.
        "speculative.model": model if separator else NULL,
    }


def _object(name: str, value: Any) -> Mapping[str, object]:
    """Reads an object that may be JSON; `name` names the setting and its key."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise InvalidArgument(f"must be a JSON object, got {value[:80]!r}", name) from None
    return {name: value}


def _adapters(value: Any) -> Mapping[str, object]:
    """Reads a list of NAME=FOLDER or of vLLM's {"name": ..., "path": ...}."""
    found: dict[str, object] = {}
    for each in value if isinstance(value, list | tuple) else [value]:
        entry = each
        if isinstance(each, str) and each.startswith("{"):
            try:
                entry = json.loads(each)
            except ValueError:
                entry = None
        if isinstance(entry, Mapping) and {"name", "path"} <= entry.keys():
            name, path = str(entry["name"]), entry["path"]
        elif isinstance(entry, str) and "=" in entry:
            name, _, path = entry.partition("=")
        else:
            raise InvalidArgument(f"must be NAME=FOLDER, got {str(each)[:80]!r}", "adapters")
        found[name] = path
    return {"adapters": found}


def _key_hashes(value: Any) -> Mapping[str, object]:
    """Hashes a key or a list of keys: no configuration has a key in the clear."""
    return {"auth.key_hashes": hash_given_keys(value, "api_key")}


def _origins(value: Any) -> Mapping[str, object]:
    """Reads origins, or lists of them that may be JSON, as of vLLM's flag."""
    found: list[object] = []
    for each in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(each, str) or not each.startswith("["):
            found.append(each)
            continue
        try:
            found += json.loads(each)
        except ValueError:
            text = f"must be an origin or a JSON list of origins, got {each[:80]!r}"
            raise InvalidArgument(text, "cors_origin") from None
    return {"router.cors_origins": found}


def _pools(name: str) -> tuple[str, str]:
    return f"prefill.{name}", f"decode.{name}"


SETTINGS: Final = (
    Setting(
        name="prefill",
        keys=("prefill.replicas",),
        kind=int,
        help="The number of prefill workers; with 0 the decode workers prefill.",
    ),
    Setting(
        name="decode",
        keys=("decode.replicas",),
        kind=int,
        help="The number of decode workers; at least 1.",
    ),
    Setting(
        name="routers",
        keys=("router.replicas",),
        vllm=("api_server_count",),
        kind=int,
        help="The number of routers; by default 1 on a local Ray, one for each node on a cluster.",
    ),
    Setting(
        name="tp",
        keys=_pools("tp"),
        vllm=("tensor_parallel_size",),
        kind=int,
        help="Ranks that share the model, in each worker of both pools.",
    ),
    Setting(
        name="prefill_tp",
        keys=("prefill.tp",),
        kind=int,
        help="Ranks of each prefill worker; wins over --tp.",
    ),
    Setting(
        name="decode_tp",
        keys=("decode.tp",),
        kind=int,
        help="Ranks of each decode worker; wins over --tp.",
    ),
    Setting(name="dtype", keys=("dtype",), vllm=("dtype",), help="float32, bfloat16 or float16."),
    Setting(
        name="quantization",
        keys=("quantization",),
        vllm=("quantization",),
        help="Rounds the weights when they are loaded: int8 (CPUs only), int4 or fp8.",
    ),
    Setting(
        name="kv_cache_dtype",
        keys=("kv_cache_dtype",),
        vllm=("kv_cache_dtype",),
        help="The number format of the KV cache: auto (--dtype), int8, fp8, or int4 (CPUs).",
    ),
    Setting(
        name="kv_cache_gb",
        keys=_pools("kv_cache_gb"),
        kind=float,
        help="GiB of KV cache of each rank; by default the rest of its memory, on CPUs at most 1.",
    ),
    Setting(
        name="gpu_memory_utilization",
        keys=_pools("gpu_memory_utilization"),
        vllm=("gpu_memory_utilization",),
        kind=float,
        help="The part of its GPU's memory, or of its share of it, that a rank may use.",
    ),
    Setting(
        name="num_gpus",
        keys=_pools("num_gpus"),
        kind=float,
        help="GPUs of each rank; 0.5 lets two ranks share a GPU.",
    ),
    Setting(
        name="kv_host_gb",
        keys=_pools("kv_host_gb"),
        kind=float,
        help="GiB of each rank's host memory for evicted blocks of the KV cache.",
    ),
    Setting(
        name="state_slots",
        keys=_pools("state_slots"),
        kind=int,
        help="The number of recurrent states (as of Mamba) in each rank's KV cache; by default as "
        "many as half of it holds.",
    ),
    Setting(
        name="kv_disk",
        keys=_pools("kv_disk"),
        kind=Path,
        help="A folder that keeps KV cache beyond a restart; needs --kv-disk-gb.",
    ),
    Setting(
        name="kv_disk_gb",
        keys=_pools("kv_disk_gb"),
        kind=float,
        help="GiB of --kv-disk for each worker.",
    ),
    Setting(
        name="block_size",
        keys=_pools("block_size"),
        vllm=("block_size",),
        kind=int,
        help="Tokens of a KV block.",
    ),
    Setting(
        name="prefix_caching",
        keys=("prefix_caching",),
        vllm=("enable_prefix_caching",),
        kind=bool,
        help="Reuse the KV cache of earlier prompts with the same beginning.",
    ),
    Setting(
        name="max_sequences",
        keys=_pools("max_sequences"),
        vllm=("max_num_seqs",),
        kind=int,
        help="The maximum of sequences in one batch of a worker; by default 256, on CPUs 64.",
    ),
    Setting(
        name="chunk_tokens",
        keys=_pools("chunk_tokens"),
        vllm=("max_num_batched_tokens",),
        kind=int,
        help="The maximum of prompt tokens that a worker computes in one step; by default 2048, on "
        "CPUs 512, with one thread 128.",
    ),
    Setting(
        name="speculative",
        keys=("speculative",),
        vllm=("speculative_config",),
        convert=_speculative,
        help="Speculative decoding: ngram, draft=MODEL, or vLLM's JSON.",
    ),
    Setting(name="device", keys=("device",), help="cpu or cuda."),
    Setting(
        name="num_threads",
        keys=_pools("num_threads"),
        kind=int,
        help="Threads of each rank; by default its share of the node's cores.",
    ),
    Setting(
        name="numerics",
        keys=("numerics",),
        help="fast; or, on GPUs, exact: slower kernels whose logits do not depend on the batch.",
    ),
    Setting(
        name="model_impl",
        keys=("model_impl",),
        vllm=("model_impl",),
        help="The code that computes: auto, tandem or transformers.",
    ),
    Setting(
        name="context_tokens",
        keys=("context_tokens",),
        vllm=("max_model_len",),
        kind=int,
        help="The longest prompt plus completion, in tokens; by default the model's context.",
    ),
    Setting(
        name="generation_config",
        keys=("generation_config",),
        vllm=("generation_config",),
        help="Defaults of requests: auto (of the model's generation_config.json) or none.",
    ),
    Setting(
        name="sampling_defaults",
        keys=("sampling_defaults",),
        vllm=("override_generation_config",),
        convert=partial(_object, "sampling_defaults"),
        help="Defaults of requests, which win over the model's, as JSON such as "
        '{"temperature": 0.6}.',
    ),
    Setting(
        name="tool_call_parser",
        keys=("tool_call_parser",),
        vllm=("tool_call_parser",),
        help="The format of the model's tool calls; auto finds it in the chat template.",
    ),
    Setting(
        name="reasoning_parser",
        keys=("reasoning_parser",),
        vllm=("reasoning_parser",),
        help="The format of the model's reasoning; auto finds it in the chat template.",
    ),
    Setting(
        name="chat_template",
        keys=("chat_template",),
        vllm=("chat_template",),
        help="Replaces the model's chat template: a file, the template itself in one line, or a "
        "name such as chatml, llama-3 or alpaca.",
    ),
    Setting(
        name="chat_template_kwargs",
        keys=("chat_template_kwargs",),
        vllm=("default_chat_template_kwargs",),
        convert=partial(_object, "chat_template_kwargs"),
        help="Variables of the chat template for requests that do not set them, as JSON such as "
        '{"enable_thinking": false}.',
    ),
    Setting(
        name="adapters",
        keys=("adapters",),
        vllm=("lora_modules",),
        kind=list,
        convert=_adapters,
        help="A LoRA adapter, NAME=FOLDER. May be given several times.",
    ),
    Setting(
        name="max_loras",
        keys=("lora.max_loras",),
        vllm=("max_loras",),
        kind=int,
        help="The maximum of LoRA adapters that a worker holds at once.",
    ),
    Setting(
        name="max_lora_rank",
        keys=("lora.max_lora_rank",),
        vllm=("max_lora_rank",),
        kind=int,
        help="The greatest rank of a LoRA adapter.",
    ),
    Setting(
        name="served_model_name",
        keys=("served_model_name",),
        vllm=("served_model_name",),
        kind=list,
        help="The name under which the model is served, by default the last part of MODEL. May be "
        "given several times; answers have the first name.",
    ),
    Setting(
        name="name",
        keys=("name",),
        help="The service's name; services on one cluster need different names.",
    ),
    Setting(
        name="host",
        keys=("host",),
        vllm=("host",),
        help="The interface that all servers bind; by default loopback on a local Ray, the node's "
        "address on a cluster.",
    ),
    Setting(
        name="grpc_port",
        keys=("router.grpc_port",),
        kind=int,
        help="The port of the gRPC API; 0 takes a free one.",
    ),
    Setting(
        name="http_port",
        keys=("router.http_port",),
        vllm=("port",),
        kind=int,
        help="The port of the HTTP API; 0 takes a free one.",
    ),
    Setting(
        name="ops_port",
        keys=("router.ops_port",),
        kind=int,
        help="The port of metrics and probes; 0 takes a free one.",
    ),
    Setting(
        name="host_name",
        keys=("router.host_names",),
        kind=list,
        help="A host name by which clients call the HTTP API without keys, or the status page. May "
        "be given several times; * is any name.",
    ),
    Setting(
        name="cors_origin",
        keys=("router.cors_origins",),
        vllm=("allowed_origins",),
        kind=list,
        convert=_origins,
        help="An origin of web pages that may use the HTTP API, such as https://chat.example.com. "
        "May be given several times; * is any origin.",
    ),
    Setting(
        name="api_keys",
        keys=("auth.keys_file",),
        kind=Path,
        help="The file of API keys, made by `tandem key create`.",
    ),
    Setting(
        name="api_key",
        keys=("auth.key_hashes",),
        vllm=("api_key",),
        kind=list,
        convert=_key_hashes,
        help="A key that calls need; otherwise TANDEM_API_KEY. May be given several times. Other "
        "users can see it: --api-keys is safer.",
    ),
    Setting(
        name="allow_anonymous",
        keys=("auth.allow_anonymous",),
        kind=bool,
        has_negation=False,
        help="Allow calls without a key, on any interface.",
    ),
    Setting(
        name="watermark_key",
        keys=("watermark.key_file",),
        kind=Path,
        help="The file with the key of watermarks, made by `tandem watermark key`.",
    ),
    Setting(
        name="reflection", keys=("router.reflection",), kind=bool, help="Serve gRPC reflection."
    ),
    Setting(
        name="dashboard",
        keys=("dashboard",),
        kind=bool,
        help="Start Ray's dashboard with a local Ray.",
    ),
)

ALWAYS_ON: Final = {
    "enable_auto_tool_choice": "tool calls are always parsed",
    "enable_chunked_prefill": "prompts are always computed in chunks",
    "enable_lora": "LoRA adapters are always possible",
    "enable_prompt_tokens_details": "the usage always has the cached tokens",
    "enable_request_id_headers": "answers of the API have X-Request-Id",
    "enable_ssl_refresh": "changed certificates are always read again",
}
"""vLLM's switches for what Tandem always does, with the reason; Tandem takes them silently."""

NO_EFFECT: Final = {
    "trust_remote_code": "no code of a checkpoint is run",
    "enforce_eager": "CUDA graphs cannot be switched off",
    "async_scheduling": "on GPUs the next step is always launched ahead",
    "enable_expert_parallel": "a model is split by tensor parallelism only; set tp",
    "disable_log_requests": "requests are logged with log_format: json only",
    "disable_uvicorn_access_log": "there is no such log",
}
"""vLLM's switches that change no answer, on or off; Tandem takes them and logs the reason."""

SAME_VALUES: Final[Mapping[str, tuple[str, ...]]] = {
    "dtype": ("auto",),
    "seed": ("0",),
    "load_format": ("auto", "safetensors"),
    "tokenizer_mode": ("auto",),
    "pipeline_parallel_size": ("1",),
    "pp": ("1",),
    "data_parallel_size": ("1",),
    "dp": ("1",),
    "runner": ("auto", "generate"),
    "task": ("auto", "generate"),
}
"""Values of other flags of vLLM that change nothing; Tandem takes them and logs the reason."""

DEFAULT_DTYPE: Final = "the default is bfloat16, whatever the dtype of the checkpoint"
"""The reason why the dtype `auto` has no effect."""

REFUSED: Final = {
    "seed": "each request sets a seed",
    "pipeline_parallel_size": "a model is split by tensor parallelism only; set tp",
    "data_parallel_size": "workers share the load; set prefill and decode",
    "pp": "a model is split by tensor parallelism only; set tp",
    "dp": "workers share the load; set prefill and decode",
    "revision": "write MODEL@REVISION",
    "tokenizer": "the model's folder holds its tokenizer",
    "tokenizer_mode": "the model's folder holds its tokenizer",
    "tokenizer_revision": "the model's folder holds its tokenizer",
    "skip_tokenizer_init": "requests may have token ids as prompts",
    "download_dir": "HF_HOME or TANDEM_HOME names the folder",
    "load_format": "weights are read from safetensors and GGUF files",
    "hf_overrides": "edit the config.json of a local folder",
    "hf_token": "HF_TOKEN holds it",
    "swap_space": "set kv_host_gb",
    "cpu_offload_gb": "weights stay on the device; kv_host_gb keeps KV cache in host memory",
    "kv_offloading_size": "set kv_host_gb, which is for each rank",
    "kv_offloading_backend": "set kv_host_gb or kv_disk",
    "kv_cache_memory_bytes": "set kv_cache_gb",
    "num_gpu_blocks_override": "set kv_cache_gb",
    "kv_transfer_config": "workers always transfer KV cache; kv_transports chooses how",
    "compilation_config": "nothing is compiled by torch",
    "distributed_executor_backend": "the processes of a service are always started by Ray",
    "scheduling_policy": "requests go by priority, then by tenant, SLO class and deadline",
    "max_cpu_loras": "max_loras bounds the adapters of a worker",
    "lora_dtype": "adapters have the model's dtype",
    "limit_mm_per_prompt": "prompts are text",
    "runner": "one service generates and embeds",
    "task": "one service generates and embeds",
    "guided_decoding_backend": "requests choose the grammar; there is one backend",
    "structured_outputs_config": "requests choose the grammar; there is one backend",
    "max_logprobs": "the maximum is fixed",
    "logits_processors": "requests cannot run code",
    "chat_template_content_format": "the form of messages is found in the chat template",
    "tool_parser_plugin": "there is no such hook; set tool_call_parser",
    "tool_server": "clients run the tools",
    "enable_force_include_usage": "requests set stream_options.include_usage",
    "enable_log_requests": "set log_format: json",
    "disable_log_stats": "set metrics: false",
    "max_log_len": "no log has a prompt",
    "uvicorn_log_level": "set log_format",
    "otlp_traces_endpoint": "set tracing.endpoint",
    "allow_credentials": "API keys are sent in headers",
    "allowed_methods": "cors_origin allows the methods of the API",
    "allowed_headers": "cors_origin allows all headers",
    "ssl_certfile": "set router.tls.certificate",
    "ssl_keyfile": "set router.tls.key",
    "ssl_ca_certs": "set router.tls.client_ca",
    "ssl_cert_reqs": "router.tls.client_ca demands certificates",
    "ssl_ciphers": "ciphers cannot be chosen; TLS is 1.2 or newer",
    "root_path": "serve at the root of a name",
    "uds": "serve on loopback",
    "middleware": "there is no such hook",
    "disable_fastapi_docs": "/openapi.json is always served",
    "response_role": "the role is assistant",
    "enable_sleep_mode": "stop the service",
    "model": "give the model as the argument: tandem serve MODEL",
    "stream_interval": "each token is sent as soon as it is known",
    "max_num_partial_prefills": "set chunk_tokens, which bounds the prompt tokens of a step",
    "attention_backend": "there is one backend for each device",
    "O": "nothing is compiled by torch",
    "disable_custom_all_reduce": "there is no custom all-reduce",
    "enable_eplb": "a model is split by tensor parallelism only; set tp",
    "decode_context_parallel_size": "a model is split by tensor parallelism only; set tp",
    "nnodes": "Ray places the workers; join its cluster by address",
    "kv_events_config": "routers know the prefixes of workers; no events are published",
}
"""vLLM's flags that Tandem does not have, with the reason or with the setting to use instead.

SAME_VALUES has the exceptions.
"""

_BY_VLLM_NAME: Final = {name: setting for setting in SETTINGS for name in setting.vllm}


def collect_overrides(values: Mapping[str, Any]) -> dict[str, object]:
    """Returns dotted keys of the configuration for values by our names.

    None, [] and () set nothing; typer gives () for an absent flag that may be repeated. A later row
    of SETTINGS wins over an earlier one. Raises InvalidArgument.
    """
    overrides: dict[str, object] = {}
    for setting in SETTINGS:
        value = values.get(setting.name)
        if value is not None and value != [] and value != ():
            overrides |= setting.overrides(value)
    return overrides


def local_keys(names: Mapping[str, Any]) -> dict[str, str]:
    """Returns the key of the configuration that each argument of `LLM` sets, by its name.

    Raises InvalidArgument for a name that only vLLM has.
    """
    ours = {setting.name: setting for setting in SETTINGS} | _BY_VLLM_NAME
    for name in names:
        check_supported(name)
    return {name: ours[name].keys[-1] if name in ours else name for name in names}


def has_no_effect(name: str, value: object, shown: str) -> bool:
    """Returns True if vLLM's setting has no effect with this value; logs the reason.

    `value` is True or False for a switch. The log has `shown` for both.
    """
    reason = ""
    if isinstance(value, bool):
        reason = NO_EFFECT.get(name, "")
    elif str(value) in SAME_VALUES.get(name, ()):
        reason = REFUSED.get(name, DEFAULT_DTYPE)
    if reason:
        _log.warning("%s has no effect: %s", shown, reason)
    return bool(reason)


def check_supported(name: str, field: str = "") -> None:
    """Raises InvalidArgument if `name` is of a setting that only vLLM has; `field` names it."""
    for each in (name, name.removeprefix("no_")):
        if each in REFUSED:
            text = f"not supported: {REFUSED[each]}; docs/from-vllm.md lists vLLM's flags"
            raise InvalidArgument(text, field or name)


def split_aliases(
    tree: Mapping[str, Any], own: Container[str]
) -> tuple[dict[str, Any], dict[str, object]]:
    """Splits the top level of a configuration file into our keys and overrides by vLLM's names.

    `own` has the names of our keys. The keys of the overrides are dotted. Raises InvalidArgument
    for a name that only vLLM has, and for a key that two names set. Leaves out what has no effect.
    """
    kept: dict[str, Any] = {}
    aliases: dict[str, Any] = {}
    for key, value in tree.items():
        name = str(key).replace("-", "_")
        if has_no_effect(name, value, f"{key}: {value}"):
            continue
        is_alias = key not in own and (name in _BY_VLLM_NAME or name in ALWAYS_ON)
        if key not in own:
            check_supported(name, str(key))
        if is_alias:
            aliases[key] = value
        else:
            kept[key] = value
    overrides: dict[str, object] = {}
    for key, value in aliases.items():
        name = key.replace("-", "_")
        if name in ALWAYS_ON:
            if value is not True:
                raise InvalidArgument(f"must be true: {ALWAYS_ON[name]}", key)
            continue
        added = _BY_VLLM_NAME[name].overrides(value)
        for dotted in added:
            if dotted in overrides or _holds(kept, dotted):
                raise InvalidArgument(f"sets {dotted}, which another key sets", key)
        overrides |= added
    return kept, overrides


def _holds(tree: Any, dotted: str) -> bool:
    """Returns True if a tree of keys and values has this dotted key."""
    for part in dotted.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return False
        tree = tree[part]
    return True
