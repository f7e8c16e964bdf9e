"""Names a LoRA adapter in the form of vLLM's."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """Names an adapter, which is loaded when it is first used."""

    lora_name: str
    lora_int_id: int = 0  # without effect: adapters are told apart by what they hold
    lora_path: str = ""  # a folder as peft writes it

    @property
    def folder(self) -> Path:
        return Path(self.lora_path).absolute()
