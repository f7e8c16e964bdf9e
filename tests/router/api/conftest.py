"""Provides clients of the HTTP API of the service under test."""

from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from tandem.tests.router.conftest import Service

_WAIT = 10.0  # seconds


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
