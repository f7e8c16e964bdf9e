"""Makes LoRA adapters of tiny models with peft, as folders, and computes what they should:
transformers and peft.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def make_adapter(
    folder: Path,
    model: Path,
    *,
    rank: int = 8,
    seed: int = 0,
    targets: Sequence[str] = LINEAR,
    **options: Any,
) -> Path:
    """Writes a random adapter of a tiny model, which changes its tokens; `options` go to
    LoraConfig.
    """
    config = LoraConfig(
        r=rank, target_modules=list(targets), **({"lora_alpha": 2 * rank} | options)
    )
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(adapted.named_parameters()):
            if "lora_" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.4 * noise / parameter.shape[-1] ** 0.5)
    adapted.save_pretrained(str(folder))
    return folder


def peft_reference(model: Path, folders: dict[str, Path]) -> PeftModel:
    """Returns the model in transformers with all these adapters, of which `set_adapter` chooses one
    by its name.
    """
    base = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    (first, folder), *others = folders.items()
    adapted = PeftModel.from_pretrained(base, folder, adapter_name=first)
    for name, folder in others:
        adapted.load_adapter(folder, adapter_name=name)
    return adapted.eval()
