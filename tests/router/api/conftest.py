"""Provides services with a fake token source, and clients of the HTTP API of one under test."""

from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from tandem.router.api.service import GenerationService
from tandem.router.frontend.served_model import ServedModel
from tandem.tests.router.conftest import Service
from tandem.tests.router.fake_source import FakeTokenSource

_WAIT = 10.0  # seconds


@pytest.fixture
def source() -> FakeTokenSource:
    return FakeTokenSource()


@pytest.fixture
def generation(model: ServedModel, source: FakeTokenSource) -> GenerationService:
    return GenerationService([model], source)


@pytest.fixture
async def http(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{service.http}", timeout=_WAIT) as client:
        yield client


@pytest.fixture
async def client(service: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://{service.http}/v1", api_key="key", max_retries=0
    ) as client:
        yield client
