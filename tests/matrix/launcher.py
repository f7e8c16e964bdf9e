"""Starts workers and ranks as processes of their own, fast: a process that has imported everything
forks them.

Reads one JSON object a line, forks, and the child answers with one line. All end when standard
input does.
"""

import asyncio
import base64
import ctypes
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from queue import Full
from typing import Any, Final

from tandem.proto import worker_pb2
from tandem.tests.matrix.control import Control
from tandem.tests.worker_config import worker_config
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.events import Event, Preempted
from tandem.workers.engine.plan import StepPlan
from tandem.workers.engine.scheduler import Scheduler
from tandem.workers.engine.sequence import Sequence, SequenceSpec
from tandem.workers.model.kernels.c import cpu
from tandem.workers.serve.request_manager import RequestManager
from tandem.workers.serve.session import RouterSession
from tandem.workers.serve.watchdog import WatchedExecutor
from tandem.workers.serve.worker import Worker
from tandem.workers.tp.rank_server import RankServer

_SET_DEATH_SIGNAL: Final = 1  # prctl's PR_SET_PDEATHSIG


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        if os.fork() == 0:
            _run_child(json.loads(line))


def _run_child(spec: dict[str, Any]) -> None:
    """Runs what `spec` asks for until the process is killed."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    logging.basicConfig(level=logging.ERROR)
    status = 1
    try:
        asyncio.run(_serve_rank(spec) if spec["kind"] == "rank" else _serve_worker(spec))
        status = 0
    finally:
        os._exit(status)


async def _serve_rank(spec: dict[str, Any]) -> None:
    server = await RankServer.start(worker_config(**spec["config"]).rank)
    _answer(spec, address=server.address)
    await server.ended.wait()


async def _serve_worker(spec: dict[str, Any]) -> None:
    if spec["control"]:
        _install(Control(Path(spec["control"])))
    for hook in spec["hooks"]:
        _HOOKS[hook["name"]](hook)
    config = worker_config(**spec["config"])
    worker = await Worker.start(
        config, worker_id=spec["worker_id"], role=spec["role"], ranks=spec["ranks"]
    )
    address = worker.address
    if spec["kv_address"]:
        worker.address = spec["kv_address"]  # its KV cache is fetched through a proxy
        for proxy in (spec["kv_address"], spec["router_address"]):
            worker._server.answer_to(proxy)
    info = base64.b64encode(worker.info().SerializeToString()).decode()
    _answer(spec, address=address, info=info)
    await worker.failed.wait()
    await asyncio.Event().wait()  # the test sees that it has failed, and ends it


def _answer(spec: dict[str, Any], **values: str) -> None:
    # One short write, so that the lines of several children do not mix.
    os.write(
        1, (json.dumps({"ticket": spec["ticket"], "pid": os.getpid()} | values) + "\n").encode()
    )


def _install(control: Control) -> None:
    """Has this process's worker obey `control`."""
    launch, accept, enqueue = WatchedExecutor.launch, RequestManager.submit, Engine.submit
    grow, make_room, do_suspend = Scheduler._grow, Scheduler._make_room, RequestManager.suspend

    def held_launch(self: WatchedExecutor, plan: StepPlan, on_layers: Any = None) -> Any:
        control.wait(plan)
        return launch(self, plan, on_layers)

    def counted_submit(
        self: RequestManager, session: RouterSession, submit: worker_pb2.Submit
    ) -> None:
        control.count_submit()
        accept(self, session, submit)

    def counted_suspend(
        self: RequestManager, session: RouterSession, suspend: worker_pb2.Suspend
    ) -> None:
        do_suspend(self, session, suspend)
        control.count_suspend()

    def refused_submit(self: Engine, spec: SequenceSpec, submitted: float | None = None) -> None:
        if control.refusals:
            control.refusals -= 1
            raise Full
        enqueue(self, spec, submitted)

    def starved_grow(self: Scheduler, sequence: Sequence) -> list[Event]:
        if not control.starves:
            return grow(self, sequence)
        control.starves = False
        preempted = self._requests.abort(self._requests.running[-1])
        return [
            *(Preempted(id=number) for number in preempted),
            *grow(self, sequence),
        ]  # which may be another's

    def starved_room(self: Scheduler, sequence: Sequence, count: int, num_kept: int) -> int:
        return (
            0 if control.starves else make_room(self, sequence, count, num_kept)
        )  # a draft takes no block that `grow` is to miss

    WatchedExecutor.launch = held_launch  # type: ignore[method-assign]
    Scheduler._grow = starved_grow  # type: ignore[method-assign]
    Scheduler._make_room = starved_room  # type: ignore[method-assign]
    RequestManager.suspend = counted_suspend  # type: ignore[method-assign]
    RequestManager.submit = counted_submit  # type: ignore[method-assign]
    Engine.submit = refused_submit  # type: ignore[method-assign]


def _poison(hook: dict[str, Any]) -> None:
    """Kills the process some time after a step with a certain token has begun."""
    launch = WatchedExecutor.launch

    def dying_launch(self: WatchedExecutor, plan: StepPlan, on_layers: Any = None) -> Any:
        if any(hook["token"] in step.token_ids for step in plan.sequences):
            time.sleep(hook["seconds"])
            os.kill(os.getpid(), signal.SIGKILL)
        return launch(self, plan, on_layers)

    WatchedExecutor.launch = dying_launch  # type: ignore[method-assign]


def _plain(hook: dict[str, Any]) -> None:
    """Computes attention by plain torch, which adds in another order for chunks."""
    cpu.can_attend = lambda *_: False


def _shorten(hook: dict[str, Any]) -> None:
    """Has handles of suspended choices name one token less than there is."""
    offer = RequestManager._offer

    def short_offer(self: RequestManager, *args: Any) -> worker_pb2.KvHandle:
        handle = offer(self, *args)
        handle.num_tokens -= 1
        return handle

    RequestManager._offer = short_offer  # type: ignore[assignment, method-assign]


_HOOKS: Final = {"poison": _poison, "plain": _plain, "shorten": _shorten}

if __name__ == "__main__":
    main()
