"""Loads LoRA adapters into the model of one rank."""

import logging
from collections.abc import Collection
from pathlib import Path

import torch

from ...proto import worker_pb2
from ..model.adapter_folder import read_adapter
from ..model.config import CheckpointError
from ..model.runner import ModelRunner
from .adapters import LoadOnRank

logger = logging.getLogger(__name__)


def adapter_loader(runner: ModelRunner, folders: Collection[str], max_rank: int) -> LoadOnRank:
    """Returns a function that loads adapters from the `folders` and from folders below them."""
    roots = [Path(folder).resolve() for folder in folders]

    def load(number: int, adapter: worker_pb2.Adapter) -> str:
        try:
            folder = Path(adapter.folder).resolve()
            if not any(folder.is_relative_to(root) for root in roots):
                return "folder: is outside of the configured adapter folders"
            read = read_adapter(folder, max_rank)
            if read.fingerprint != adapter.fingerprint:
                return "folder: its files have changed since the adapter was loaded"
            runner.adapters.load(number, read)
        except CheckpointError as error:
            return str(error)
        except (OSError, ValueError):  # such as a zero byte or a loop of links
            return "folder: cannot be read"
        except (MemoryError, torch.OutOfMemoryError):
            return "folder: the adapter does not fit into memory"
        except RuntimeError:  # torch's, for example if host memory is full; the worker still works
            logger.exception("an adapter cannot be loaded")
            return "folder: the adapter cannot be loaded"
        return ""

    return load
