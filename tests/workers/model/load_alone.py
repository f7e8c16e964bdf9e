"""Run as a program: loads one rank of a model and prints the peak of the process's memory
meanwhile, in bytes.
"""

import sys
from pathlib import Path

import torch

from tandem.workers.model.checkpoint import Checkpoint
from tandem.workers.model.loader import open_checkpoint
from tandem.workers.model.runner import ModelRunner


class LoneRank:
    """A rank without the others of its group; loading makes no collective call."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        raise AssertionError

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError


def resident(field: str) -> int:
    """Bytes: VmRSS now, VmHWM at most so far; anonymous, file-mapped and shared pages together."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def load(folder: str, dtype: str, rank: int, size: int) -> ModelRunner:
    return load_opened(open_checkpoint(Path(folder)), dtype, rank, size)


def load_opened(checkpoint: Checkpoint, dtype: str, rank: int, size: int) -> ModelRunner:
    group = LoneRank(rank, size)
    return ModelRunner.load(
        checkpoint, dtype=dtype, device="cpu", num_blocks=1, block_size=16, group=group
    )


def main(warmup: str, folder: str, dtype: str, rank: str, size: str) -> None:
    torch.set_num_threads(1)
    load(warmup, dtype, 0, 1)  # the code that loading runs is in memory from here on
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is now
    before = resident("VmRSS")
    runner = load(folder, dtype, int(rank), int(size))
    print(resident("VmHWM") - before)
    del runner


if __name__ == "__main__":
    main(*sys.argv[1:])
