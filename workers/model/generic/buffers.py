"""Fills the buffers that checkpoints lack, such as rotary frequencies, and keeps them constant.

If frequencies depended on the longest sequence of a batch, requests would change each other's
tokens. Dynamic scaling changes nothing up to max_position_embeddings, the maximum length of a
sequence here. With LongRoPE (arXiv 2402.13753), a model whose context is longer than its original
context uses the long factors for all sequences, as in vLLM.
"""

from collections.abc import Iterator
from copy import deepcopy
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
        if hasattr(module, "rope_init_fn"):
            _fix_phimoe(module)


def _fix_phimoe(module: Any) -> None:
    """Makes PhiMoE's rotary embedding take its frequencies from its buffer, as the others do.

    By itself it computes them in each call, always with LongRoPE's short factors, and takes a scale
    by the longest sequence of the batch.
    """
    parameters = module.config.rope_parameters
    if parameters["rope_type"] == "longrope":
        name = "long_mscale" if _is_long(module.config) else "short_mscale"
        module.attention_scaling = parameters[name]
        module.config = deepcopy(module.config)
        module.config.rope_parameters["rope_type"] = "default"  # has no scale by length
    module.rope_init_fn = lambda config: (module.inv_freq, module.attention_scaling)


def _is_long(config: Any) -> bool:
    """Returns True if a model with LongRoPE has a longer context than its original one."""
    original = config.rope_parameters["original_max_position_embeddings"]
    return bool(config.max_position_embeddings > original)


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
        if kind == "longrope" and _is_long(module.config):
            frequencies, _ = ROPE_INIT_FUNCTIONS[kind](
                module.config, device, seq_len=module.config.max_position_embeddings
            )
            module.inv_freq.copy_(frequencies)


def _changing(model: nn.Module) -> Iterator[tuple[Any, str]]:
    for module in model.modules():
        if kind := getattr(module, "changing_rope_type", None):
            yield module, kind
