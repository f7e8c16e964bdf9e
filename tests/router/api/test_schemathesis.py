"""Tests that any body, allowed by the OpenAPI document or not, gets a documented answer."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.config import SchemathesisConfig
from schemathesis.core.result import Ok
from schemathesis.generation.feedback import FeedbackSources
from schemathesis.generation.hypothesis.builder import (
    InvalidHeadersExampleMark,
    MissingPathParameters,
    UnserializablePayloadMark,
)
from schemathesis.pytest._test_builder import build_operation_test
from schemathesis.python._constants.orchestrator import make_constants_value_source
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tandem.router.api.server.http_operations import POSTS
from tandem.router.api.server.http_server import HttpServer
from tandem.router.api.service import GenerationService
from tandem.router.frontend.served_model import ServedModel
from tandem.tests.router.fake_source import FakeTokenSource, byte_tokenizer
from tandem.tests.waits import WAIT

EXAMPLES = settings().max_examples if settings().max_examples > 100 else 12
"""By Hypothesis's profile: 12 beside the hundreds of boundary cases, and 2,000 in `make fuzz`."""

Case = schemathesis.Case[Any]

_source = FakeTokenSource()
_model = ServedModel(name="tiny", tokenizer=byte_tokenizer(), context_tokens=512)
_server = HttpServer(GenerationService([_model], _source))
_settings = {"generation": {"allow-x00": True, "max-examples": EXAMPLES}}
schema = schemathesis.openapi.from_asgi(
    "/openapi.json",
    _server._listener.config.app,
    headers={"host": "localhost"},
    config=SchemathesisConfig.from_dict(_settings),
)
SAME = {"/v1/score": "/score", "/v1/rerank": "/rerank", "/v2/rerank": "/rerank"}
"""Paths of which another path has the operation and the code."""

OPERATIONS = {
    each.ok().label: each.ok()
    for each in schema.get_all_operations()
    if isinstance(each, Ok) and each.ok().path not in SAME
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Yields the address of the service, which runs in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"http://{asyncio.run_coroutine_threadsafe(_started(), loop).result(WAIT)}"
    asyncio.run_coroutine_threadsafe(_server.stop(1), loop).result(WAIT)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    assert _source.running == 0


async def _started() -> str:
    address = await _server.start("127.0.0.1:0")
    _server.set_serving(True)
    return address


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


def _direct(case: Case) -> None:
    """Sets the model and known roles; otherwise these would cause nearly all refusals."""
    if case.path_parameters and len(str(case.path_parameters["name"])) > 1:
        case.path_parameters["name"] = _model.name
    if not isinstance(case.body, dict):
        return
    if len(str(case.body.get("model", ""))) > 1:
        case.body["model"] = _model.name
    messages = case.body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and len(str(message.get("role", ""))) > 1:
            message["role"] = "assistant" if message.get("tool_calls") else "user"


@settings(max_examples=EXAMPLES, derandomize=True, suppress_health_check=list(HealthCheck))
def check_answer(case: Case, address: str, session: requests.Session) -> None:
    """Fails unless a request has a documented answer."""
    _direct(case)
    response = case.call(base_url=address, session=session)
    if response.status_code >= 500:  # the only way to one is to ask for it
        assert response.status_code == 504
        assert 0 < float(case.headers["x-request-timeout"]) < 1
    case.validate_response(
        response,
        checks=[status_code_conformance, content_type_conformance, response_schema_conformance],
    )


def test_the_other_paths_of_an_operation_have_its_code() -> None:
    for path, other in SAME.items():
        assert POSTS[path] is POSTS[other]
        assert f"POST {other}" in OPERATIONS


@pytest.mark.parametrize("label", OPERATIONS)
def test_every_request_has_a_documented_answer(
    label: str, address: str, session: requests.Session
) -> None:
    """Makes the requests of an operation here: `schema.parametrize` makes them while tests are
    collected, for seconds in each process.
    """
    ask = build_operation_test(
        config=schema.config,
        operation=OPERATIONS[label],
        test_func=check_answer,
        given_kwargs={},
        feedback=FeedbackSources(constants_value_source=make_constants_value_source(schema)),
    )
    ask(address=address, session=session)
    for mark in (MissingPathParameters, InvalidHeadersExampleMark, UnserializablePayloadMark):
        assert mark.get(ask) is None
