"""Converts a GGUF file into a folder of safetensors.

Run as `python -m tandem.cluster.store.gguf_convert FILE DTYPE`. The working folder receives the
files that `save_pretrained` writes: config.json, model.safetensors, tokenizer.json,
tokenizer_config.json, chat_template.jinja. transformers converts; this module adds the parts that
transformers drops (RoPE, windows, the pooling of embeddings; `gguf_tokenizer` those of the
tokenizer), and refuses a file of which more would be lost.
"""

import math
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...workers.model.config import CheckpointError
from ...workers.model.loader import check_checkpoint, weight_shapes
from ...workers.model.registry import load_model_config
from .gguf_header import GgufHeader, GgufTensor, read_gguf_header
from .gguf_tokenizer import (
    check_splitting,
    drop_invented_tokens,
    end_tokens,
    restore_tokenizer,
)
from .pooling import write_mode

_LAYERS_OF_27B: Final = {"gemma2": 46, "gemma3": 62}
"""The numbers of layers by which llama.cpp recognizes Gemma 27B."""
_WITH_FURTHER_BLOCKS: Final = ("qwen35", "qwen35moe")
"""Architectures whose blocks that predict further tokens (MTP) transformers leaves out."""
_POOLINGS: Final = {1: "mean", 2: "cls", 3: "lasttoken"}
"""llama.cpp's numbers of poolings; 0 is none, and 4 the head of a model that ranks."""
_ROPE_FREQS: Final = "rope_freqs.weight"
_ROPE_FACTORS: Final = ("rope_factors_short.weight", "rope_factors_long.weight")
_F32: Final = 0


def convert(gguf: Path, out: Path, dtype: str) -> None:
    """Writes the model of `gguf` to the existing folder `out`.

    Raises CheckpointError for a file that transformers cannot convert without loss, or that Tandem
    does not serve.
    """
    header = read_gguf_header(gguf)
    check_splitting(header, gguf.name)
    _check_attention(header, gguf.name)
    with TemporaryDirectory(prefix=".gguf.", dir=out.parent) as folder:
        # transformers prefers files beside a GGUF file to the content of that file.
        alone = Path(folder, gguf.name)
        alone.symlink_to(gguf.resolve())
        _convert(alone, header, out, dtype)


def _convert(gguf: Path, header: GgufHeader, out: Path, dtype: str) -> None:
    """Converts a file that is alone in its folder. Raises as `convert`."""
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
    }
    config = AutoConfig.from_pretrained(**source)
    config.architectures = [
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type)
    ]
    config.dtype = getattr(torch, dtype)
    if key_length := header.of_model("attention.key_length"):
        config.head_dim = key_length
    _restore_rope(config, header, gguf)
    _restore_attention(config, header)
    config.save_pretrained(out)
    _check_size(out, header, gguf.name)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        **source,
        config=config,
        dtype=config.dtype,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    model, report = loaded
    if missing := min(report["missing_keys"], default=""):
        raise CheckpointError(f"{gguf.name}: {missing}: missing")
    tokenizer = AutoTokenizer.from_pretrained(**source)
    restore_tokenizer(tokenizer, header)
    if ends := end_tokens(tokenizer.get_vocab(), header):
        model.generation_config.eos_token_id = ends
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    if mode := _POOLINGS.get(header.of_model("pooling_type")):
        write_mode(out, mode)
    drop_invented_tokens(out, header.values.get("tokenizer.ggml.tokens", 0))
    check_checkpoint(out)


def _restore_rope(config: Any, header: GgufHeader, gguf: Path) -> None:
    """Restores the scaling of rotary embeddings, which transformers drops when it reads GGUF.

    Without it the model handles only short prompts. Also restores the base, which transformers
    drops for StarCoder 2. Raises CheckpointError for an unknown scaling.
    """
    if not getattr(config, "rope_parameters", None):
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Of several kinds of layers, only full attention is scaled.
    target = config.rope_parameters.get("full_attention", config.rope_parameters)
    if (rotated := header.of_model("rope.dimension_count", head_dim)) < head_dim:
        target["partial_rotary_factor"] = rotated / head_dim
    if base := header.of_model("rope.freq_base"):
        target["rope_theta"] = base
    # As in llama.cpp: old files have the second name, a factor of 0 stands for none, and a scale
    # without a type is linear.
    factor = header.of_model("rope.scaling.factor", header.of_model("rope.scale_linear")) or 1.0
    kind = header.of_model("rope.scaling.type", "none" if factor == 1.0 else "linear")
    original = header.of_model(
        "rope.scaling.original_context_length", config.max_position_embeddings
    )
    rope: dict[str, Any]
    short, long, computed = (
        _read_factors(gguf, header.tensors.get(name)) for name in (*_ROPE_FACTORS, _ROPE_FREQS)
    )
    if short and long:
        rope = {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "attention_factor": header.of_model("rope.scaling.attn_factor", 1.0),
        }
    elif computed:  # the divisors of the frequencies, computed as for Llama 3.1
        rope = {
            "rope_type": "longrope",
            "short_factor": computed,
            "long_factor": computed,
            "attention_factor": 1.0,
        }
    elif kind == "linear":
        rope = {"rope_type": kind, "factor": factor}
    elif kind == "yarn":
        rope = {"rope_type": kind, "factor": factor, **_read_yarn(header, factor, gguf.name)}
    elif kind == "none":
        return
    else:
        field = f"{header.architecture}.rope.scaling.type"
        raise CheckpointError(
            f"{gguf.name}: {field}: {kind!r:.60} is not supported; supported: linear, yarn, "
            "longrope"
        )
    if rope["rope_type"] != "linear":
        rope["original_max_position_embeddings"] = original
        if hasattr(config, "original_max_position_embeddings"):
            config.original_max_position_embeddings = original
    target.update(rope)


def _read_yarn(header: GgufHeader, factor: float, name: str) -> dict[str, float]:
    """Returns the bounds of YaRN. Raises CheckpointError for an unclear factor of attention.

    Some converters write the whole factor of cos and sin, others one beside the factor that YaRN
    derives. As in llama.cpp, 1 changes nothing; the derived factor is clear as well.
    """
    derived = 0.1 * math.log(max(factor, 1.0)) + 1.0
    field = "rope.scaling.yarn_attn_factor"
    given = header.of_model(field, 1.0)
    if not any(math.isclose(given, usual, rel_tol=1e-5) for usual in (1.0, derived)):
        raise CheckpointError(
            f"{name}: {header.architecture}.{field}: {given!r:.60} is not supported, only 1 and "
            f"{derived:.7g}, which follows from the factor {factor!r:.60}"
        )
    return {
        "beta_fast": header.of_model("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": header.of_model("rope.scaling.yarn_beta_slow", 1.0),
    }


def _check_attention(header: GgufHeader, name: str) -> None:
    """Raises CheckpointError for a bidirectional model, which transformers would run as causal."""
    field = "attention.causal"
    if not header.of_model(field, True):
        raise CheckpointError(
            f"{name}: {header.architecture}.{field}: false, attention to later tokens, is not "
            "supported"
        )


def _restore_attention(config: Any, header: GgufHeader) -> None:
    """Restores the window of Phi-3, and the scale of Gemma 27B, which no field of a file has."""
    window = header.of_model("attention.sliding_window")
    if window and getattr(config, "sliding_window", 0) is None:
        config.sliding_window = window
    if header.of_model("block_count") == _LAYERS_OF_27B.get(header.architecture):
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads


def _read_factors(gguf: Path, tensor: GgufTensor | None) -> list[float]:
    if tensor is None or tensor.kind != _F32:
        return []
    values = np.fromfile(gguf, dtype="<f4", count=math.prod(tensor.shape), offset=tensor.begin)
    return [float(value) for value in values]


def _check_size(folder: Path, header: GgufHeader, name: str) -> None:
    """Checks, before the model is built, that its parameters are exactly the numbers of the file.

    transformers ignores tensors that it does not know, and gives missing ones random values. It
    leaves out the blocks after the layers of Qwen3.5, which predict further tokens, on purpose.
    """
    config = load_model_config(folder)
    num_parameters = sum(map(math.prod, weight_shapes(config).values()))
    further: tuple[str, ...] = ()
    if header.architecture in _WITH_FURTHER_BLOCKS:
        blocks = range(len(config.layers), header.of_model("block_count"))
        further = tuple(f"blk.{block}." for block in blocks)
    num_held = sum(
        math.prod(tensor.shape)
        for key, tensor in header.tensors.items()
        if key not in (_ROPE_FREQS, *_ROPE_FACTORS) and not key.startswith(further)
    )
    if num_parameters != num_held:
        raise CheckpointError(
            f"{name}: tensors: hold {num_held} numbers; {config.architecture} of transformers has "
            f"{num_parameters} parameters"
        )


def main(gguf: Path, dtype: str) -> None:
    """Converts into the working folder; if that fails, the last line of stderr tells why."""
    try:
        convert(gguf, Path.cwd(), dtype)
    except CheckpointError as error:
        sys.exit(f"ERROR: {error}")
    except Exception as error:  # transformers may raise any exception for a hostile file
        reason = " ".join(str(error).replace(str(gguf), gguf.name).split())
        sys.exit(
            f"ERROR: transformers {transformers.__version__} cannot read it: "
            f"{type(error).__name__} {reason:.200}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
