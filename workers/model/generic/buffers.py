"""Fills the buffers that checkpoints lack, such as rotary frequencies, and keeps them constant.

If frequencies depended on the longest sequence of a batch, requests would change each other's
tokens. Dynamic scaling changes nothing up to max_position_embeddings, the maximum length of a
sequence here. With LongRoPE (arXiv 2402.13753), a model whose context is longer than its original
context uses the long factors for all sequences, as in vLLM.
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
    """Stops rotary embeddings from changing their frequencies.

    Raises CheckpointError for a changing embedding that only some kinds of layers have.
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
            module.changing_rope_type = kind
            module.rope_type = "default"


def fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Computes the buffers by transformers' code; does not change the weights."""
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
