"""Reads the LoRA adapters that a configuration or a caller names."""

from pathlib import Path

from ...proto.errors import InvalidArgument
from ...router.adapters import AdapterRegistry
from ...router.request import LoraAdapter
from ...workers.model.adapter_folder import read_adapter
from ...workers.model.config import CheckpointError
from ..config import TandemConfig


def configured_adapters(config: TandemConfig) -> AdapterRegistry:
    """Reads the adapters of the configuration. Raises InvalidArgument for an unusable adapter.

    Other routers' adapters are served only from the folders that the workers accept.
    """
    return AdapterRegistry(
        (
            named_adapter(config.lora.max_lora_rank, f"adapters.{name}", name, Path(folder))
            for name, folder in config.adapters.items()
        ),
        [Path(folder).resolve() for folder in config.adapter_folders],
    )


def named_adapter(max_rank: int, field: str, name: str, folder: Path) -> LoraAdapter:
    """Reads an adapter. Raises InvalidArgument, which names `field`, if it cannot be used."""
    try:
        return LoraAdapter(
            name=name, folder=str(folder), fingerprint=read_adapter(folder, max_rank).fingerprint
        )
    except CheckpointError as error:
        raise InvalidArgument(str(error), field) from None
