"""Fills the buffers that no checkpoint has, such as rotary frequencies, and fixes those that would
change by the step.

Frequencies that depend on the longest sequence of a batch would let requests change each other: the
dynamic scaling changes nothing up to max_position_embeddings, beyond which no sequence here goes,
and of LongRoPE (arXiv 2402.13753) a model whose context is beyond the original one takes the long
factors for all, as vLLM does.
"""

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..config import Fields

_CHANGING: Final = ("dynamic", "longrope")


def fix_rope(model: PreTrainedModel, fields: Fields) -> None:
    """Lets no rotary embedding change its frequencies. Raises CheckpointError for one of several
    kinds of layers.
    """
    modules: Iterator[Any] = model.modules()
    for module in modules:
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict) and not set(_CHANGING).isdisjoint(kind.values()):
            raise fields.error(
                "rope_parameters",
                "dynamic and longrope are not supported for a kind of layers alone",
            )
        if kind in _CHANGING:
            module.changing_rope_type, module.rope_type = kind, "default"


def fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Lets transformers compute the buffers; the weights are left as they are."""
    for name, buffer in list(model.named_non_persistent_buffers()):
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path)._buffers[leaf] = torch.empty_like(buffer, device=device)
    tensors: dict[str, Any] = model.state_dict(keep_vars=True)
    for tensor in tensors.values():
        tensor._is_hf_initialized = True
    for module, kind in _changing(model):
        module.rope_type = kind
    modules: Iterator[Any] = model.modules()
    for module in modules:
        module._is_hf_initialized = False
    model.initialize_weights()  # type: ignore[no-untyped-call]
    for module, kind in _changing(model):
        module.rope_type = "default"
        original = module.config.rope_parameters.get("original_max_position_embeddings")
        if kind == "longrope" and module.config.max_position_embeddings > original:
            frequencies, _ = ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=original + 1)
            module.inv_freq.copy_(frequencies)


def _changing(model: nn.Module) -> Iterator[tuple[Any, str]]:
    for module in model.modules():
        if kind := getattr(module, "changing_rope_type", None):
            yield module, kind
