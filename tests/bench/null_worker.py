"""Serves a worker with the real engine and no model: `python -m tandem.tests.bench.null_worker`.

`bench.router` starts it. It is a separate module because it imports torch, which the measured
router and the measuring process do not need.
"""

import sys
from typing import Final

from tandem.proto.identity import PeerIdentity
from tandem.tests.bench.router import CONTEXT_TOKENS, run_as_replica, until_stdin_ends
from tandem.tests.workers.engine.null import NullExecutor
from tandem.workers.engine.config import Budgets
from tandem.workers.serve.worker import Worker, WorkerConfig
from tandem.workers.tp.rank import Rank, RankConfig

_VOCAB_SIZE: Final = 128  # the part of the byte tokenizer's tokens that are whole characters
_BLOCKS: Final = 65_536
_MAX_STREAMS: Final = 4096


async def serve(step_seconds: float) -> None:
    """Reads the identity from stdin, prints the address, and serves until stdin ends."""
    identity = PeerIdentity.from_text(sys.stdin.readline())
    executor = NullExecutor(vocab_size=_VOCAB_SIZE, step_seconds=step_seconds)
    rank = Rank(
        executor=executor,
        kv=executor.kv,
        num_blocks=_BLOCKS,
        block_size=16,
        vocab_size=_VOCAB_SIZE,
        context_tokens=CONTEXT_TOKENS,
        eos_ids=frozenset(),
    )
    budgets = Budgets(max_sequences=_MAX_STREAMS, max_waiting=_MAX_STREAMS)
    config = WorkerConfig(
        rank=RankConfig(model="", identity=identity, transports=()), budgets=budgets
    )
    worker = await Worker.serve(rank, config, worker_id="null", role="decode")
    await until_stdin_ends(worker.address)
    await worker.stop()


if __name__ == "__main__":
    run_as_replica(serve(float(sys.argv[1]) / 1e3))
