"""Starts a service with real API servers on free ports and tokens from a fake source."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import pytest

from tandem.router.api.server.grpc_server import GrpcServer
from tandem.router.api.server.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.frontend.served_model import ServedModel
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.tests.router.fake_source import FakeTokenSource, byte_tokenizer
from tandem.tests.watermarks import RULES

CONTEXT_TOKENS = 512


class Servers(Protocol):
    async def set_serving(self, serving: bool) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Service:
    """Holds what a test of the API servers needs."""

    servers: Servers
    source: FakeTokenSource
    grpc: str  # HOST:PORT
    http: str = ""


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture
def model(tokenizer: Tokenizer) -> ServedModel:
    return ServedModel(
        name="tiny", tokenizer=tokenizer, context_tokens=CONTEXT_TOKENS, watermark=RULES
    )


@pytest.fixture
async def service(model: ServedModel) -> AsyncIterator[Service]:
    """Starts both servers."""
    source = FakeTokenSource()
    server = await ApiServers.start(GenerationService([model], source))
    await server.set_serving(True)
    yield Service(servers=server, source=source, grpc=server.grpc_address, http=server.http_address)
    await server.stop(0)
    assert source.running == 0


@pytest.fixture
async def grpc_service(model: ServedModel) -> AsyncIterator[Service]:
    """Starts the gRPC server alone, which is faster."""
    source = FakeTokenSource()
    server = GrpcServer(GenerationService([model], source), reflection=True)
    address = await server.start("127.0.0.1:0")
    await server.set_serving(True)
    yield Service(servers=server, source=source, grpc=address)
    await server.stop(0)
    assert source.running == 0
