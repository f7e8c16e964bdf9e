"""Defines the argument that names a LoRA adapter, in the form of vLLM."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """Names an adapter, which is loaded at its first use, and again when its files have changed."""

    lora_name: str
    lora_int_id: int = 0  # another number: the files are read again; the content identifies them
    lora_path: str = ""  # a folder in the format of peft

    @property
    def folder(self) -> Path:
        return Path(self.lora_path).absolute()
