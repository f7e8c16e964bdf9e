"""A request that kills whatever worker computes it: it costs two workers at most, and no other
request anything. No other router tries it again.
"""

import asyncio

import psutil
import pytest

from tandem.cluster.serve.members import Directory, RouterInfo
from tandem.cluster.serve.views.member_view import DirectoryWatcher
from tandem.proto.errors import InternalError
from tandem.router.adapters import AdapterRegistry
from tandem.router.dispatch.blocked_prompts import BlockedPrompts
from tandem.router.request import TokenRequest
from tandem.tests.local_directory import LocalDirectory
from tandem.tests.matrix.cluster import Cluster, Result, collect, make_request
from tandem.tests.matrix.nodes import Node
from tandem.tests.tiny_tokenizer import VOCAB_SIZE
from tandem.tests.token_request import changed
from tandem.tests.waits import WAIT

NUM_OTHERS = 32
BLOCKING, JOINING = (
    RouterInfo(router_id=name, grpc_address="h:1", http_address="h:2") for name in ("a", "b")
)
pytestmark = pytest.mark.asyncio(loop_scope="module")


def make_others(cluster: Cluster) -> list[TokenRequest]:
    """Returns requests with prompts of their own."""
    made = [make_request("seed", cluster.name()) for _ in range(NUM_OTHERS)]
    return [
        changed(request, token_ids=(*request.submit.token_ids[number:], 5 + number))
        for number, request in enumerate(made)
    ]


async def watch(cluster: Cluster, nodes: list[Node]) -> None:
    """Has the directory list the nodes that live."""
    while True:
        living = [node for node in nodes if is_living(node)]
        if len(living) < len(cluster.registry.workers()):
            cluster.show(*living)
        await asyncio.sleep(0.05)


def is_living(node: Node) -> bool:
    """Returns whether the node's process runs."""
    return psutil.pid_exists(node.pids[0])


def unused_token(requests: list[TokenRequest], results: list[Result]) -> int:
    """Returns a token that none of the requests has or generates."""
    used = {token for request in requests for token in request.submit.token_ids}
    used |= {token for result in results for token in result.choices[0].ids}
    return max(set(range(VOCAB_SIZE)) - used)


async def ask_another_router(
    cluster: Cluster, directory: LocalDirectory, request: TokenRequest
) -> None:
    """Asks a router that joins now and knows of blocked_prompts by the directory alone."""
    blocked_prompts = BlockedPrompts()
    await directory.watch(DirectoryWatcher(), JOINING, blocked_prompts, AdapterRegistry())
    router = cluster.router(blocked_prompts)
    try:
        await collect(router, changed(request, request_id=cluster.name()))
    finally:
        await router.close()


@pytest.mark.parametrize(
    ("seconds", "prefix"), [(0.3, "d"), pytest.param(0.0, "e", marks=pytest.mark.matrix)]
)
async def test_a_poisonous_request_harms_no_other(
    cluster: Cluster, seconds: float, prefix: str
) -> None:
    directory, blocked_prompts = LocalDirectory(Directory()), BlockedPrompts()
    await cluster.renew(blocked_prompts)
    cluster.show(await cluster.node("d0"))
    requests = make_others(cluster)
    expected = await asyncio.gather(*(collect(cluster.dispatcher, request) for request in requests))
    token = unused_token(requests, expected)
    hooks = [{"name": "poison", "token": token, "seconds": seconds}]
    nodes = [
        await cluster.node(name, hooks=hooks) for name in (f"{prefix}{n}" for n in range(5, 9))
    ]
    cluster.show(*nodes)
    watching = asyncio.create_task(watch(cluster, nodes))
    poison = make_request("seed", cluster.name())
    prompt = poison.submit.token_ids
    poison = changed(poison, token_ids=(*prompt[:20], token, *prompt[20:]))
    again = [changed(request, request_id=cluster.name()) for request in requests]
    try:
        async with asyncio.timeout(100):
            asked = [
                asyncio.create_task(collect(cluster.dispatcher, request))
                for request in [*again[:16], poison]
            ]
            asked += [
                asyncio.create_task(collect(cluster.dispatcher, request)) for request in again[16:]
            ]
            results = await asyncio.gather(*asked, return_exceptions=True)
        refusal = results.pop(16)
        assert isinstance(refusal, InternalError), refusal
        failed = [result for result in results if isinstance(result, BaseException)]
        assert not failed, failed
        choices = [result.choices for result in results if isinstance(result, Result)]
        assert choices == [result.choices for result in expected]
        num_living = len(nodes) - 2
        async with asyncio.timeout(WAIT):
            while (
                sum(map(is_living, nodes)) > num_living
            ):  # a session breaks before its process is gone
                await asyncio.sleep(0.01)
        assert sum(map(is_living, nodes)) == num_living, "more than two workers were lost"
        with pytest.raises(InternalError):
            await collect(cluster.dispatcher, changed(poison, request_id=cluster.name()))
        await directory.watch(DirectoryWatcher(), BLOCKING, blocked_prompts, AdapterRegistry())
        with pytest.raises(InternalError):
            await ask_another_router(cluster, directory, poison)
        assert sum(map(is_living, nodes)) == num_living, "a retry has cost another worker"
        await cluster.check_books([node for node in nodes if is_living(node)])
    finally:
        watching.cancel()
