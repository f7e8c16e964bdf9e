"""Tests stored responses with the official `openai` package."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from tandem.proto.errors import Unavailable
from tandem.router.api.responses import stored
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.tests.router.api.weather_tool import CALL, HERMES, SCHEMA, last_prompt
from tandem.tests.router.conftest import Service
from tandem.tests.router.fake_source import EOS_ID, byte_tokenizer
from tandem.tests.waits import WAIT


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer(chat_template=HERMES)


async def test_a_stored_response_is_continued(service: Service, client: openai.AsyncOpenAI) -> None:
    """As in OpenAI's guide to conversation state: each turn names the response before."""
    service.source.answer = [*b"A joke.", EOS_ID]
    first = await client.responses.create(
        model="tiny", input="tell me a joke", instructions="Be brief."
    )
    assert first.to_dict()["store"] is True
    service.source.answer = [*b"Because.", EOS_ID]
    second = await client.responses.create(
        model="tiny",
        previous_response_id=first.id,
        input=[{"role": "user", "content": "explain why this is funny."}],
    )
    # The instructions belong to one response alone.
    assert last_prompt(service) == (
        "user: tell me a joke\nassistant: A joke.\nuser: explain why this is funny.\nassistant: "
    )
    assert second.previous_response_id == first.id
    await client.responses.delete(first.id)  # the second has the whole conversation
    third = await client.responses.create(
        model="tiny", previous_response_id=second.id, input="again", store=False
    )
    assert last_prompt(service).startswith("user: tell me a joke\nassistant: A joke.\n")
    assert last_prompt(service).endswith("assistant: Because.\nuser: again\nassistant: ")
    for gone in (first.id, third.id, "resp_none"):
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(gone)
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(gone)
        with pytest.raises(openai.NotFoundError):
            await client.responses.input_items.list(gone)
        with pytest.raises(openai.BadRequestError, match="stored here") as caught:  # as OpenAI's
            await client.responses.create(model="tiny", previous_response_id=gone, input="x")
        assert caught.value.param == "previous_response_id"


async def test_a_stored_response_is_retrieved(
    service: Service, client: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    service.source.answer = [*b"hello", EOS_ID]
    made = await client.responses.create(model="tiny", input="one", metadata={"a": "b"})
    assert (await client.responses.retrieve(made.id)).to_dict() == made.to_dict()
    async with client.responses.stream(
        model="tiny", input="two", previous_response_id=made.id
    ) as stream:
        async for _ in stream:
            pass
        streamed = await stream.get_final_response()
    kept = await client.responses.retrieve(streamed.id)
    assert (kept.output_text, kept.previous_response_id) == ("hello", made.id)
    assert kept.usage == streamed.usage
    listed = await client.responses.input_items.list(streamed.id, order="asc", limit=2)
    texts: list[Any] = [item.to_dict() async for item in listed]  # all pages
    assert [item["content"][0]["text"] for item in texts] == ["one", "hello", "two"]
    assert len({item["id"] for item in texts}) == 3
    newest = (await http.get(f"/v1/responses/{streamed.id}/input_items?limit=1")).json()
    assert newest["data"] == [texts[-1]]
    assert newest["has_more"] is True
    for query, param in (
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=unknown", "after"),
    ):
        refused = await http.get(f"/v1/responses/{streamed.id}/input_items?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    refused = await http.get(f"/v1/responses/{streamed.id}?stream=true")
    assert refused.json()["error"]["param"] == "stream"


async def test_an_item_that_comes_again_is_listed_once_more(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    """Each page goes on after the one before, which needs an id of its own for each item."""
    service.source.answer = [*b"hello", EOS_ID]
    made = await client.responses.create(model="tiny", input="one")
    again: Any = [{"type": "item_reference", "id": item.id} for item in made.output]
    second = await client.responses.create(model="tiny", input=again, previous_response_id=made.id)
    listed = await client.responses.input_items.list(second.id, order="asc", limit=1)
    async with asyncio.timeout(WAIT):
        texts: list[Any] = [item.to_dict() async for item in listed]  # all pages
    assert [item["content"][0]["text"] for item in texts] == ["one", "hello", "hello"]
    assert len({item["id"] for item in texts}) == 3
    with pytest.raises(openai.BadRequestError, match=r"the same item as input\[1\]") as caught:
        await client.responses.create(model="tiny", input=[*again, *again])
    assert caught.value.param == "input[0].id"


async def test_a_conversation_has_each_request_id_once(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    """The ids of its responses and items would be the same otherwise."""
    service.source.answer = [*b"hello", EOS_ID]
    chosen: Any = {"x-request-id": "mine"}
    fields: Any = {"model": "tiny", "input": "one"}
    first = await client.responses.create(**fields, extra_headers=chosen)
    assert first.id == "resp_mine"
    second = await client.responses.create(**fields, previous_response_id=first.id)
    for previous in (first, second):
        fields["previous_response_id"] = previous.id
        with pytest.raises(openai.BadRequestError, match="choose another id") as caught:
            await client.responses.create(**fields, extra_headers=chosen)
        assert caught.value.param == "x-request-id"
        unstored = await client.responses.create(**fields, extra_headers=chosen, store=False)
        assert unstored.output_text == "hello"
    assert (await client.responses.retrieve(first.id)).to_dict() == first.to_dict()


async def test_a_client_that_keeps_the_conversation_may_use_an_id_again(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    """The later response takes the place of the earlier one; its items have ids of their own."""
    service.source.answer = [*b"hello", EOS_ID]
    chosen: Any = {"x-request-id": "mine"}
    first = await client.responses.create(model="tiny", input="one", extra_headers=chosen)
    turns: Any = [*(item.to_dict() for item in first.output), {"role": "user", "content": "two"}]
    second = await client.responses.create(model="tiny", input=turns, extra_headers=chosen)
    third = await client.responses.create(
        model="tiny", input="three", previous_response_id=second.id
    )
    listed = await client.responses.input_items.list(third.id, order="asc", limit=1)
    async with asyncio.timeout(WAIT):
        items: list[Any] = [item.to_dict() async for item in listed]  # all pages
    texts = [item["content"][0]["text"] for item in items]
    assert texts == ["hello", "two", "hello", "three"]
    assert len({item["id"] for item in items}) == 4


REASONING = {"type": "reasoning_text", "text": ""}


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"encrypted_content": "x" * 3_000_000}, "more than 8388608 bytes"),
        ({"content": [REASONING | {"annotations": [[]] * 30_000}]}, "too many elements"),
    ],
)
async def test_a_conversation_is_bounded(
    service: Service, client: openai.AsyncOpenAI, extra: Any, words: str
) -> None:
    """Each turn adds something that takes no tokens."""
    service.source.answer = [*b"hello", EOS_ID]
    turn: Any = [{"type": "reasoning", **extra}, {"role": "user", "content": "x"}]
    last: Any = None
    for _ in range(3):
        last = await client.responses.create(model="tiny", previous_response_id=last, input=turn)
        last = last.id
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        await client.responses.create(model="tiny", previous_response_id=last, input="x")
    assert caught.value.param == "previous_response_id"


async def test_a_stored_call_is_continued_by_its_output(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    service.source.answer = [*CALL.encode(), EOS_ID]
    made = await client.responses.create(model="tiny", input="weather?", tools=tools)
    (call,) = (item for item in made.output if item.type == "function_call")
    await client.responses.create(
        model="tiny",
        previous_response_id=made.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}],
        tools=tools,
    )
    assert last_prompt(service).endswith("</tool_call>\ntool: rain\nassistant: ")


async def test_a_storage_that_fails_does_not_fail_the_response(
    service: Service, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> bool:
        raise Unavailable("the directory does not answer")

    async def full(*_: object) -> bool:
        return False

    service.source.answer = [*b"hello", EOS_ID]
    for instead in (fail, full):
        monkeypatch.setattr("tandem.router.storage.local.LocalStorage.keep_response", instead)
        made = await client.responses.create(model="tiny", input="x")
        assert (made.output_text, made.to_dict()["store"]) == ("hello", False)
    monkeypatch.setattr("tandem.router.storage.local.LocalStorage.find_response", fail)
    with pytest.raises(openai.InternalServerError) as caught:
        await client.responses.retrieve("resp_1")
    assert caught.value.status_code == 503


async def test_references_to_stored_items(service: Service, client: openai.AsyncOpenAI) -> None:
    """An item of an earlier turn is found in the newest response that has it."""
    service.source.answer = [*f"I look.\n{CALL}".encode(), EOS_ID]
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    fields: Any = {"model": "tiny", "tools": tools, "extra_headers": {"x-request-id": "a_b"}}
    first = await client.responses.create(input="rain?", **fields)
    references: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    message, call = references
    question: Any = {"role": "user", "content": "rain?"}
    output: Any = {
        "type": "function_call_output",
        "call_id": first.output[1].to_dict()["call_id"],
        "output": "yes",
    }
    service.source.answer = [*b"It rains.", EOS_ID]
    fields["extra_headers"] = {}
    second = await client.responses.create(
        input=[question, message, {"id": call["id"]}, output],  # the type may be absent
        **fields,
    )
    written = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
    expected = f"user: rain?\nassistant: I look.{written}\ntool: yes\nassistant: "
    assert last_prompt(service).endswith(expected)
    await client.responses.delete(first.id)
    latest: Any = {"type": "item_reference", "id": second.output[0].id}
    await client.responses.create(input=[question, message, call, output, latest], **fields)
    assert last_prompt(service).endswith(f"{expected}It rains.\nassistant: ")
    for unknown in (call["id"], "msg_a_0", "x", "_", ""):
        with pytest.raises(openai.BadRequestError, match="send the item itself") as caught:
            await client.responses.create(
                input=[question, {"type": "item_reference", "id": unknown}], **fields
            )
        assert caught.value.param == "input[1].id"


async def test_references_to_too_large_responses(
    service: Service, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.source.answer = [*b"hello", EOS_ID]
    made = await client.responses.create(model="tiny", input="x")
    monkeypatch.setattr(stored, "_MAX_CONVERSATION_BYTES", 100)
    with pytest.raises(openai.BadRequestError, match="more than 100 bytes") as caught:
        await client.responses.create(
            model="tiny", input=[{"type": "item_reference", "id": made.output[0].id or ""}]
        )
    assert caught.value.param == "input[0].id"
