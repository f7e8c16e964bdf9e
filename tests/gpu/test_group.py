"""What one GPU can show of NCCL: a group of one rank, its collectives on device memory, within a
step and a graph.
"""

from pathlib import Path

import pytest
import torch

from tandem.tests.tiny import make_tiny_model
from tandem.tests.workers.model.helpers import Driver, prompt
from tandem.workers.model.loader import open_checkpoint
from tandem.workers.model.runner import ModelRunner
from tandem.workers.tp.process_group import TpGroup

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def lonely_group() -> TpGroup:
    group = TpGroup.listen(host="127.0.0.1", size=1, device="cuda", timeout=30, start_timeout=30)
    group.connect()
    return group


def test_collectives_work_on_device_memory() -> None:
    group = lonely_group()
    x = torch.arange(12.0, device="cuda").view(3, 4)  # [3, 4]
    assert torch.equal(group.all_reduce(x.clone()), x)
    (gathered,) = group.all_gather(x)
    assert torch.equal(gathered, x)


def test_collectives_can_be_captured() -> None:
    group = lonely_group()
    x = torch.ones(8, device="cuda")  # [8]
    group.all_reduce(x)  # the communicator is made by the first call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = group.all_reduce(x * 2)
    x.fill_(5)
    graph.replay()
    assert y.tolist() == [10.0] * 8


def test_a_split_model_runs_over_nccl(tmp_path: Path) -> None:
    folder = make_tiny_model(
        tmp_path, num_attention_heads=8, num_key_value_heads=2, hidden_size=128
    )
    checkpoint = open_checkpoint(folder)
    made = []
    for group in (None, lonely_group()):
        runner = ModelRunner.load(
            checkpoint, dtype="float32", device="cuda", num_blocks=64, block_size=16, group=group
        )
        runner.warmup()
        made.append(Driver(runner).generate(1, prompt(40), 12))
        assert runner.num_graph_replays() > 0
    assert made[0] == made[1]
