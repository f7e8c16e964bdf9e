"""Finds model families by architecture and linear methods by quantization format.

Installed packages can add more by entry points of the groups `tandem.models` (named by
architecture, a `ModelFamily`) and `tandem.linear_methods` (named by quant_method, a
`QuantizationFormat`). So every process finds them. One file because it is the one table to look a
model or a format up in.
"""

import sys
from collections.abc import Collection
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

from ...proto.errors import InvalidArgument
from .config import (
    CheckpointError,
    Fields,
    ModelConfig,
    RopeConfig,
    read_eos_token_ids,
    read_fields,
    read_json,
    text_fields,
)
from .models.cohere2 import Cohere2ForCausalLM, parse_cohere2_config
from .models.family import ModelFamily
from .models.gemma import (
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    parse_gemma2_config,
    parse_gemma3_config,
)
from .models.gpt_oss import GptOssForCausalLM, parse_gpt_oss_config
from .models.granite import (
    GraniteForCausalLM,
    GraniteHybridForCausalLM,
    parse_granite_config,
    parse_granite_hybrid_config,
    parse_minicpm_config,
)
from .models.lfm2 import Lfm2ForCausalLM, parse_lfm2_config, parse_lfm2_moe_config
from .models.llama import LlamaForCausalLM, parse_llama_config
from .models.mistral import parse_mistral_config
from .models.mixtral import (
    MixtralForCausalLM,
    Qwen3MoeForCausalLM,
    parse_mixtral_config,
    parse_qwen3_moe_config,
)
from .models.nemotron_h import NemotronHForCausalLM, parse_nemotron_h_config
from .models.olmo2 import Olmo2ForCausalLM, parse_olmo2_config
from .models.parsing import without_prefixes
from .models.phi3 import Phi3ForCausalLM, parse_phi3_config
from .models.qwen import Qwen3ForCausalLM, parse_qwen2_config, parse_qwen3_config
from .models.qwen3_5 import (
    Qwen3NextForCausalLM,
    Qwen35ForCausalLM,
    Qwen35MoeForCausalLM,
    parse_qwen3_5_config,
    parse_qwen3_5_moe_config,
    parse_qwen3_next_config,
)
from .quant.base import LinearMethod, LinearMethodOf, QuantizationFormat
from .quant.compressed_tensors import compressed_tensors_method
from .quant.fp8 import Fp8LinearMethod
from .quant.gptq import awq_method, gptq_method
from .quant.int4 import Int4LinearMethod
from .quant.integer import BITS, integer_method
from .quant.rounded import RoundedLinearMethod
from .quant.scaled import ScaledLinearMethod
from .quant.stored_fp8 import FP8, fbgemm_fp8_method, fp8_method, modelopt_method
from .quant.unquantized import UnquantizedLinearMethod

MODELS: Final[dict[str, ModelFamily]] = {
    "LlamaForCausalLM": ModelFamily(parse_llama_config, LlamaForCausalLM),
    "AquilaForCausalLM": ModelFamily(parse_llama_config, LlamaForCausalLM),
    "MistralForCausalLM": ModelFamily(parse_mistral_config, LlamaForCausalLM),
    "Qwen2ForCausalLM": ModelFamily(parse_qwen2_config, LlamaForCausalLM),
    "MiMoForCausalLM": ModelFamily(parse_qwen2_config, LlamaForCausalLM),
    "Qwen3ForCausalLM": ModelFamily(parse_qwen3_config, Qwen3ForCausalLM),
    "Olmo2ForCausalLM": ModelFamily(parse_olmo2_config, Olmo2ForCausalLM),
    "GraniteForCausalLM": ModelFamily(parse_granite_config, GraniteForCausalLM),
    "MiniCPMForCausalLM": ModelFamily(parse_minicpm_config, GraniteForCausalLM),
    "Phi3ForCausalLM": ModelFamily(parse_phi3_config, Phi3ForCausalLM),
    "Gemma2ForCausalLM": ModelFamily(parse_gemma2_config, Gemma2ForCausalLM),
    "Gemma3ForCausalLM": ModelFamily(parse_gemma3_config, Gemma3ForCausalLM),
    "Cohere2ForCausalLM": ModelFamily(parse_cohere2_config, Cohere2ForCausalLM),
    "Lfm2ForCausalLM": ModelFamily(parse_lfm2_config, Lfm2ForCausalLM),
    "Lfm2MoeForCausalLM": ModelFamily(parse_lfm2_moe_config, Lfm2ForCausalLM),
    "GraniteMoeHybridForCausalLM": ModelFamily(
        parse_granite_hybrid_config, GraniteHybridForCausalLM
    ),
    "NemotronHForCausalLM": ModelFamily(parse_nemotron_h_config, NemotronHForCausalLM),
    "MixtralForCausalLM": ModelFamily(parse_mixtral_config, MixtralForCausalLM),
    "Qwen3MoeForCausalLM": ModelFamily(parse_qwen3_moe_config, Qwen3MoeForCausalLM),
    "Qwen3_5ForCausalLM": ModelFamily(parse_qwen3_5_config, Qwen35ForCausalLM),
    "Qwen3_5MoeForCausalLM": ModelFamily(parse_qwen3_5_moe_config, Qwen35MoeForCausalLM),
    "Qwen3NextForCausalLM": ModelFamily(parse_qwen3_next_config, Qwen3NextForCausalLM),
    "GptOssForCausalLM": ModelFamily(parse_gpt_oss_config, GptOssForCausalLM),
}
TEXT_MODELS: Final = tuple(
    f"{name}ForConditionalGeneration"
    for name in (
        "DeepseekVL",
        "Gemma3",
        "GlmAsr",
        "GotOcr2",
        "Idefics2",
        "Idefics3",
        "InternVL",
        "Lfm2Vl",
        "LightOnOcr",
        "Llava",
        "LlavaNext",
        "LlavaNextVideo",
        "LlavaOnevision",
        "Mistral3",
        "MossTranscribeDiarize",
        "Ovis2",
        "Qwen2Audio",
        "Qwen3ASR",
        "Qwen3_5",
        "Qwen3_5Moe",
        "SmolVLM",
        "VideoLlama3",
        "VideoLlava",
        "VipLlava",
        "Voxtral",
    )
)
"""Multimodal architectures whose text model is exactly one of MODELS.

Others may add to it, or leave out a factor of the logits, as Cohere2Vision does in transformers.
"""
LINEAR_METHODS: Final[dict[str, QuantizationFormat]] = {
    **dict.fromkeys(BITS, integer_method),
    "compressed-tensors": compressed_tensors_method,
    "gptq": gptq_method,
    "awq": awq_method,
    FP8: fp8_method,
    "fbgemm_fp8": fbgemm_fp8_method,
    "modelopt": modelopt_method,
}
"""Formats by quant_method; without one, layers have an `UnquantizedLinearMethod`."""
_QUANTIZATION_FILES: Final = (
    ("quantize_config.json", "gptq", ".qweight"),
    ("quant_config.json", "awq", ".qweight"),
    ("hf_quant_config.json", "modelopt", ".weight_scale"),
)
"""Files that describe a quantization instead of config.json: method and tensor suffix."""
_PAGE: Final = """# Models

Written by `python -m tandem.workers.model.registry`; do not edit.

This page lists the model families that Tandem implements itself. It is for readers who want to know
if and how their checkpoint runs. Other decoders run through [transformers' code](transformers.md).
The table below names the file of each architecture (`architectures` in config.json).

Rotary embeddings are scaled as in transformers: linear, dynamic, yarn, llama3 and longrope. A
LongRoPE model whose context is longer than its original context uses the long factors for all
sequences, as vLLM does; transformers uses them only for long sequences. If `context_tokens` is
within the original context, the short factors are used, which are better there.

On CPUs, families with experts multiply by all experts in one call, and their steps are recorded as
[step programs](glossary.md), unless the processor has AMX or experts are stored in different ways.
On GPUs, they multiply by all experts in one launch, and their steps are captured in CUDA graphs.
The launch is torch's `grouped_mm` in bfloat16 with compute capability 9 and 10, and a Triton kernel
on other GPUs, in other dtypes, with weights in FP8 and with `numerics: exact`. Only experts that
are stored in different ways run one by one. The speed of experts on GPUs is not measured. gpt-oss
weights in MXFP4 are converted to the model's dtype when they are loaded, so `tandem plan memory`
counts them in that dtype.

Layers with a short convolution or a Mamba 2 mixer keep a state for each sequence and run on CPUs
only. With tensor parallelism, ranks split the channels and heads of mixers. If several ranks share
a group of heads, each of them holds the group's B and C, and the ranks add up the squares that the
norm needs.

`tests/workers/model/test_families.py` compares the logits and tokens of each family with those in
transformers: for whole prompts and chunks, alone and in a batch, after a KV transfer, and split
over ranks. Aquila, MiMo and MiniCPM are not in transformers:
`tests/workers/model/test_renamed_families.py` compares them with models of transformers that have
the same code or, for MiniCPM, the same code without its factors.

| architectures | family | file |
|---|---|---|
"""


def find_model(architecture: str, model_impl: str = "auto") -> ModelFamily:
    """Returns the family of an architecture.

    `model_impl` "transformers" selects the family that runs any decoder through transformers;
    "auto" does so if the architecture has no other family. Raises CheckpointError if it has
    none and `model_impl` is "tandem".
    """
    family = _native_family(architecture)
    if model_impl == "transformers" or (family is None and model_impl == "auto"):
        from .generic.family import TRANSFORMERS  # imports transformers, which takes a second

        return TRANSFORMERS
    if family is None:
        supported = ", ".join(MODELS)
        raise CheckpointError(
            f"config.json: architectures: {architecture!r:.60} is not supported by model_impl "
            f"tandem, only {supported}; model_impl auto may run it"
        )
    return family


def family_of(config: ModelConfig) -> ModelFamily:
    """Returns the family that parsed a model's config."""
    return find_model(
        config.architecture, "tandem" if config.transformers is None else "transformers"
    )


def find_linear_method(
    config: ModelConfig, *, batch_invariant: bool = False, device_type: str = "cpu"
) -> LinearMethodOf:
    """Returns a function that creates the linear method of a layer by its name.

    `batch_invariant` applies to methods without a kernel of their own. `device_type` as in
    `LinearMethod`. Raises CheckpointError for an unknown quant_method.
    """
    if not config.quantization:
        return lambda name: UnquantizedLinearMethod(batch_invariant=batch_invariant)
    format_name = config.quantization.get("quant_method")
    method = LINEAR_METHODS.get(str(format_name)) or _plugin(
        "tandem.linear_methods", str(format_name)
    )
    if method is None:
        supported = ", ".join(name for name in LINEAR_METHODS if name not in BITS)
        raise CheckpointError(
            f"config.json: quantization_config.quant_method: {format_name!r:.60} is not supported, "
            f"only {supported}; use the model's plain checkpoint, which --quantization can round"
        )

    def make(name: str) -> LinearMethod:
        made: LinearMethod = method(config.quantization, name)
        if device_type == "cuda" and isinstance(made, RoundedLinearMethod):
            made = _on_gpu(made)
        made.batch_invariant = batch_invariant
        made.device_type = device_type
        return made

    return make


def _on_gpu(method: RoundedLinearMethod) -> LinearMethod:
    """Returns the method by which GPUs multiply by weights that are rounded at loading."""
    if isinstance(method, Fp8LinearMethod):
        return ScaledLinearMethod()
    return Int4LinearMethod() if method.bits == BITS["int4"] else UnquantizedLinearMethod()


def with_stored_quantization(
    config: ModelConfig, folder: Path, names: Collection[str]
) -> ModelConfig:
    """Adds the quantization that a file beside config.json describes to a model's config.

    The first checkpoints of GPTQ, AWQ and ModelOpt have such a file. It is ignored if `names`, the
    names of the stored tensors, contain no quantized ones. Raises CheckpointError.
    """
    if config.quantization:
        return config
    for file, quant_method, suffix in _QUANTIZATION_FILES:
        if not (folder / file).is_file() or not any(name.endswith(suffix) for name in names):
            continue
        values = read_json(folder / file)
        nested = values.get("quantization")  # the format of ModelOpt
        found = {"quant_method": quant_method, **(nested if isinstance(nested, dict) else values)}
        config = replace(config, quantization=found)
        find_linear_method(config)
        return config
    return config


def with_quantization(config: ModelConfig, quant_method: str) -> ModelConfig:
    """Returns the config with weights that are rounded when they are loaded.

    Raises CheckpointError if the weights are quantized already.
    """
    if config.quantization or (config.experts and config.experts.is_mxfp4):
        raise CheckpointError(
            f"config.json: has a quantization_config, so {quant_method} cannot be applied"
        )
    return replace(config, quantization={"quant_method": quant_method})


def with_head(config: ModelConfig, *, is_tied: bool) -> ModelConfig:
    """Returns the config of the model with a head that is, or is not, tied to the embedding."""
    fields = config.transformers
    if fields is not None:
        tie = dict.fromkeys(("tie_word_embeddings", "tie_embedding"), is_tied)  # the latter: LFM2
        text = fields.get("text_config")
        # Some multimodal models of transformers take the value of their text model.
        nested = {"text_config": {**text, **tie}} if isinstance(text, dict) else {}
        fields = {**fields, **tie, **nested}
    return replace(config, tie_word_embeddings=is_tied, transformers=fields)


def longest_context(config: ModelConfig) -> int:
    """Returns the longest supported context: max_position_embeddings, or more with scaled RoPE."""
    spans = [_scaled_context(config, rope) for rope in set(config.ropes) if rope is not None]
    return max(config.max_position_embeddings, min(spans, default=0))


def _scaled_context(config: ModelConfig, rope: RopeConfig) -> int:
    tokens: float = config.max_position_embeddings
    if rope.kind == "yarn":
        tokens = rope.original_max_position * rope.factor
    elif rope.kind == "linear":
        tokens *= rope.factor
    return int(min(tokens, sys.maxsize))  # a factor may be so large that the product is infinite


def check_context(config: ModelConfig, context_tokens: int) -> None:
    """Raises InvalidArgument for a context that is longer than the model's."""
    if context_tokens > (longest := longest_context(config)):
        scaling = " and the scaling of rotary embeddings" if config.transformers is None else ""
        raise InvalidArgument(
            f"{context_tokens} is above the model's context of {longest} tokens "
            f"(max_position_embeddings{scaling} in config.json)",
            "context_tokens",
        )


def check_dense(config: ModelConfig, context_tokens: int) -> None:
    """Raises CheckpointError for a context that needs sparse attention."""
    most = config.dense_tokens
    if most is not None and context_tokens > most:
        raise CheckpointError(
            f"config.json: index_topk: sparse attention beyond {most} tokens is not supported; set "
            f"context_tokens to at most {most}"
        )


def with_context(config: ModelConfig, context_tokens: int) -> ModelConfig:
    """Returns the config for serving sequences of at most `context_tokens`.

    As in vLLM, LongRoPE uses its short factors if `context_tokens` is within the original context;
    models that run through transformers' code do not. Raises InvalidArgument as `check_context`.
    """
    check_context(config, context_tokens)

    def short(rope: RopeConfig | None) -> RopeConfig | None:
        if rope is None or not rope.short_factors or context_tokens > rope.original_max_position:
            return rope
        return replace(rope, factors=rope.short_factors)

    return replace(config, ropes=tuple(map(short, config.ropes)), served_tokens=context_tokens)


def load_model_config(folder: Path, model_impl: str = "auto") -> ModelConfig:
    """Reads config.json and, for the end-of-sequence tokens, generation_config.json.

    `model_impl` as in `find_model`. Raises CheckpointError if the folder or a field is missing,
    ill-typed, out of bounds or not supported.
    """
    fields = read_fields(folder)
    config = parse_model_config(fields, model_impl)
    return replace(config, eos_token_ids=read_eos_token_ids(folder, fields, config.vocab_size))


def parse_model_config(fields: Fields, model_impl: str = "auto") -> ModelConfig:
    """Parses config.json by its architecture's family.

    Raises CheckpointError as `load_model_config`.
    """
    names = fields.texts("architectures")
    if len(names) != 1:
        raise fields.error("architectures", f"must be one name, is {names!r:.60}")
    for each in (fields, text_fields(fields)):
        if not each.boolean("is_causal", True):
            raise each.error("is_causal", "false, attention to later tokens, is not supported")
    try:
        config = _parse_text_model(fields, names[0]) if model_impl == "auto" else None
        if config is None:
            config = find_model(names[0], model_impl).parse_config(fields)
    except RecursionError as error:  # JSON may be nested more deeply than Python's calls
        raise CheckpointError("config.json: objects are nested too deeply") from error
    find_linear_method(config)
    return _without_idle_windows(config)


def _without_idle_windows(config: ModelConfig) -> ModelConfig:
    """Returns the config without windows that are at least as long as the longest context.

    The context of a service does not count: workers that differ in it exchange KV cache, so their
    layers must be equal.
    """
    longest = longest_context(config)
    layers = tuple(
        layer if layer.window is None or layer.window < longest else replace(layer, window=None)
        for layer in config.layers
    )
    return replace(config, layers=layers)


def _parse_text_model(fields: Fields, architecture: str) -> ModelConfig | None:
    """Returns the config of a multimodal model's text model if a family of ours runs it.

    Raises CheckpointError.
    """
    if architecture not in TEXT_MODELS:
        return None
    from .generic.config import text_model_fields  # imports transformers, which takes a second

    text = text_model_fields(fields)
    family = _native_family(text.texts("architectures")[0]) if text else None
    if text is None or family is None:
        return None
    config = family.parse_config(text)
    return replace(
        config,
        text_model_of=architecture,
        quantization=without_prefixes(config.quantization),
    )


def _native_family(architecture: str) -> ModelFamily | None:
    """Returns the family of an architecture, such as MistralForCausalLM, or MistralModel alone.

    The latter is a decoder that was saved without its head, for embeddings.
    """
    own = MODELS.get(architecture) or _plugin("tandem.models", architecture)
    return own or MODELS.get(f"{architecture.removesuffix('Model')}ForCausalLM")


def markdown() -> str:
    """Returns the page docs/models.md."""
    files: dict[str, list[str]] = {}
    for architecture, family in MODELS.items():
        files.setdefault(family.parse_config.__module__, []).append(architecture)
    rows = []
    for module, architectures in files.items():
        text = " ".join((sys.modules[module].__doc__ or "").split("\n\n")[0].split())
        name = module.rpartition(".")[2]
        file = f"[{name}.py](../workers/model/models/{name}.py)"
        rows.append(f"| {', '.join(f'`{each}`' for each in architectures)} | {text} | {file} |")
    return _PAGE + "\n".join(rows) + "\n"


def _plugin(group: str, name: str) -> Any:
    return next((point.load() for point in entry_points(group=group, name=name)), None)


if __name__ == "__main__":
    print(markdown(), end="")
