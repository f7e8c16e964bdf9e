"""Makes random LoRA adapters without peft, which a bare GPU machine lacks."""

import torch
from safetensors.torch import save

from tandem.workers.model.adapter_folder import AdapterFolder
from tandem.workers.model.config import ModelConfig
from tandem.workers.model.device import DTYPES
from tandem.workers.model.loader import build_model


def random_adapter(config: ModelConfig, rank: int) -> AdapterFolder:
    """Returns an adapter of all linear layers with almost no effect."""
    lora = build_model(config, DTYPES[config.dtype]).lora
    tensors: dict[str, torch.Tensor] = {}
    for part, _ in lora.layers if lora else []:
        for name, outputs, _ in part.outputs:
            layer = f"base_model.model.{name}"
            down = torch.randn(rank, part.num_inputs, dtype=torch.bfloat16)
            up = torch.randn(outputs, rank, dtype=torch.bfloat16)
            tensors[f"{layer}.lora_A.weight"] = down * part.num_inputs**-0.5
            tensors[f"{layer}.lora_B.weight"] = up * 1e-3
    return AdapterFolder(rank=rank, scale=1.0, weights=save(tensors), fingerprint=bytes(16))
