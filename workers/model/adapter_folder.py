"""Reads a LoRA adapter's folder in peft's format: settings, weights as bytes, and fingerprint.

Imports no torch and knows nothing of the model's structure.
"""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .config import CheckpointError, Fields, read_fields

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
_MAX_WEIGHT_BYTES: Final = 4 * 1024**3

_UNSUPPORTED: Final = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
"""Fields of peft's LoraConfig that change an adapter's output unless they are empty or false."""

_BASE_CHANGING: Final = ("corda", "loftq", "lora_ga", "olora", "pissa")
"""Prefixes of `init_lora_weights` values with which peft also changes the model's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFolder:
    """Holds the content of an adapter's folder, read once."""

    rank: int
    scale: float  # factor of B A
    weights: bytes  # in safetensors format
    fingerprint: bytes  # 16 bytes; equal settings and weights give equal fingerprints


def read_adapter(folder: Path, max_rank: int) -> AdapterFolder:
    """Reads an adapter's folder.

    Raises CheckpointError, one line naming file and field, if a file is missing, leads out of the
    folder or is too large, or if peft's settings are not supported.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{CONFIG_FILE}: the folder does not exist")
    try:
        fields = read_fields(folder, CONFIG_FILE)
    except OSError as error:
        raise CheckpointError(f"{CONFIG_FILE}: cannot be read ({error.strerror})") from error
    kind = fields.text("peft_type")
    if kind != "LORA":
        raise fields.error("peft_type", f"{kind[:32]!r} is not supported, only 'LORA'")
    for name, value in fields.items():
        if name in _UNSUPPORTED and value not in (None, False, [], {}):
            raise fields.error(name, "is not supported")
    if fields.has("bias") and fields.text("bias") != "none":
        raise fields.error("bias", "is not supported, only 'none'")
    initial = dict(fields.items()).get("init_lora_weights")
    if isinstance(initial, str) and initial.lower().startswith(_BASE_CHANGING):
        raise fields.error(
            "init_lora_weights",
            f"{initial[:32]!r} is not supported: it changes the model's weights",
        )
    rank = fields.integer("r", 8)
    if rank > max_rank:
        raise fields.error("r", f"{rank} is above the maximum of {max_rank} (max_lora_rank)")
    weights = _read_weights(folder / WEIGHTS_FILE)
    scale = _scale(fields, rank)
    digest = hashlib.sha256(f"{rank} {scale!r} ".encode())
    digest.update(weights)
    return AdapterFolder(rank=rank, scale=scale, weights=weights, fingerprint=digest.digest()[:16])


def _scale(fields: Fields, rank: int) -> float:
    """Returns alpha / r, or alpha / sqrt(r) for a rank-stabilized adapter (arXiv 2312.03732)."""
    alpha = fields.number("lora_alpha", 8.0)
    is_stabilized = fields.boolean("use_rslora", False)
    return alpha / (math.sqrt(rank) if is_stabilized else rank)


def _read_weights(path: Path) -> bytes:
    """Reads the whole file.

    A memory-mapped tensor would crash the process if the file were truncated meanwhile.
    """
    try:
        size = path.stat().st_size
        if size > _MAX_WEIGHT_BYTES:
            raise CheckpointError(f"{path.name}: larger than {_MAX_WEIGHT_BYTES} bytes")
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.name}: not found (only safetensors weights are read)"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error.strerror})") from error
