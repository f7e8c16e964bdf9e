"""Tests the page of the console in a real browser, at times that a whole service rarely meets."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tandem.router.api.console.feed import ConsoleFeed
from tandem.router.api.server.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.auth.authenticator import Authenticator, Caller
from tandem.router.frontend.served_model import ServedModel
from tandem.tests.browser import chromium, count, problems, set_window, text, wait
from tandem.tests.router.api.http_bodies import TEXT, body
from tandem.tests.router.auth.keys import api_key, bearer
from tandem.tests.router.fake_source import EOS_ID, FakeTokenSource, byte_tokenizer
from tandem.tests.waits import WAIT

KEYS = (api_key("ada"), api_key("ops", operator=True))

THINKING_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% endfor %}"
)


class HeldFeed(ConsoleFeed):
    """Answers the polls of one key only once `goes_on` is set; `holds` tells that one waits."""

    held: str | None = None  # the name of the key

    def __init__(self, generation: GenerationService) -> None:
        super().__init__(generation.telemetry)
        self.holds = asyncio.Event()
        self.goes_on = asyncio.Event()

    async def answer(self, cursor: str, caller: Caller) -> bytes:
        found = await super().answer(cursor, caller)
        if caller.key_name == self.held:
            self.holds.set()
            await self.goes_on.wait()
        return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as driver:
        set_window(driver, 1280)
        yield driver


@pytest.fixture
def feed(generation: GenerationService) -> HeldFeed:
    return HeldFeed(generation)


@asynccontextmanager
async def served(
    generation: GenerationService, feed: HeldFeed, authenticator: Authenticator | None = None
) -> AsyncIterator[str]:
    """Serves on a new port, so the browser has no key of another test; yields the URL."""
    servers = await ApiServers.start(generation, authenticator=authenticator, console=feed)
    await servers.set_serving(True)
    try:
        yield f"http://{servers.http_address}"
    finally:
        await servers.stop(0)


@pytest.fixture
async def keyed_page(
    browser: Any, generation: GenerationService, feed: HeldFeed
) -> AsyncIterator[Any]:
    """A browser that shows the console with the operator's key. Each key has an ended request."""
    async with served(generation, feed, Authenticator(KEYS)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=WAIT) as client:
            for key in ("ada", "ops"):
                headers = bearer(key) | {"x-request-id": f"of-{key}"}
                await client.post(TEXT, json=body(TEXT, max_tokens=2), headers=headers)
        await asyncio.to_thread(browser.get, f"{url}/console")
        await until(lambda: text(browser, "#live") == "Key needed")
        await enter_key(browser, "ops")
        await until(lambda: text(browser, "#live") == "Live")
        problems(browser)  # of the poll without a key
        yield browser
        feed.goes_on.set()
        await asyncio.to_thread(browser.get, "about:blank")


@pytest.fixture
async def page(browser: Any, generation: GenerationService, feed: HeldFeed) -> AsyncIterator[Any]:
    """A browser that shows the playground of a service without keys."""
    async with served(generation, feed) as url:
        await asyncio.to_thread(browser.get, f"{url}/console#playground")
        await until(lambda: text(browser, "#live") == "Live")
        yield browser
        await asyncio.to_thread(browser.get, "about:blank")


async def until(holds: Callable[[], object]) -> None:
    """Waits in a thread, because the service lives in this event loop."""
    await asyncio.to_thread(wait, holds)


async def enter_key(page: Any, key: str) -> None:
    await asyncio.to_thread(type_text, page, "#key-input", f"{key}\n")


def type_text(page: Any, selector: str, keys: str) -> None:
    page.find_element("css selector", selector).send_keys(keys)


def click(page: Any, selector: str) -> None:
    page.find_element("css selector", selector).click()


def ids(page: Any) -> list[str]:
    """Returns the ids of the ended requests that the page lists."""
    script = (
        "return [...document.querySelectorAll('#requests .waterfall code')].map("
        "each => each.textContent)"
    )
    found: list[str] = page.execute_script(script)
    return found


async def test_a_poll_of_the_key_before_changes_nothing(keyed_page: Any, feed: HeldFeed) -> None:
    await until(lambda: ids(keyed_page) == ["of-ops", "of-ada"])
    feed.held = "ops"
    await asyncio.wait_for(feed.holds.wait(), WAIT)
    await asyncio.to_thread(click, keyed_page, "#key")
    await enter_key(keyed_page, "ada")
    await until(lambda: ids(keyed_page) == [])
    assert await asyncio.to_thread(text, keyed_page, "#live") == "Connecting"
    feed.goes_on.set()
    await until(lambda: text(keyed_page, "#key") == "Key ada")
    await until(lambda: ids(keyed_page) == ["of-ada"])
    assert await asyncio.to_thread(problems, keyed_page) == []


async def test_a_seed_that_javascript_rounds_is_refused(page: Any, source: FakeTokenSource) -> None:
    await asyncio.to_thread(type_text, page, "#parameter-seed", str(2**53 + 1))
    await asyncio.to_thread(type_text, page, "#message", "a question\n")
    await until(lambda: "Seed" in text(page, ".compose .problem"))
    assert source.requests == []


async def test_clear_forgets_an_answer_that_streams(page: Any, source: FakeTokenSource) -> None:
    source.stall_after = 3
    await asyncio.to_thread(type_text, page, "#message", "a private question\n")
    await until(lambda: count(page, ".turn.assistant .token") == 3)
    await asyncio.to_thread(click, page, "form.chat .actions .quiet")
    await source.wait_running(0)
    assert await asyncio.to_thread(text, page, ".log") == "No questions yet."
    assert await asyncio.to_thread(text, page, "form.chat .primary") == "Send"
    source.stall_after = None
    await asyncio.to_thread(type_text, page, "#message", "another\n")
    await until(lambda: count(page, ".turn.assistant .note") == 1)
    await source.wait_running(0)
    await until(lambda: "token" in text(page, ".turn.assistant .note"))
    prompt = bytes(source.requests[-1].submit.token_ids)
    assert prompt == b"[user] another\n[assistant] "
    assert await asyncio.to_thread(text, page, ".log .said") == "another"
    assert "No questions yet." not in await asyncio.to_thread(text, page, ".log")
    assert await asyncio.to_thread(problems, page) == []


async def test_a_thought_is_shown_without_log_probabilities(
    browser: Any, source: FakeTokenSource
) -> None:
    source.answer = [*b"<think>\nA thought.", EOS_ID]
    model = ServedModel(
        name="tiny", tokenizer=byte_tokenizer(THINKING_TEMPLATE), context_tokens=512
    )
    generation = GenerationService([model], source)
    async with served(generation, HeldFeed(generation)) as url:
        await asyncio.to_thread(browser.get, f"{url}/console#playground")
        await until(lambda: text(browser, "#live") == "Live")
        clear = "document.querySelector('#parameter-top_logprobs').value = ''"
        await asyncio.to_thread(browser.execute_script, clear)
        await asyncio.to_thread(type_text, browser, "#message", "a question\n")
        await until(lambda: "tokens/s" in text(browser, ".turn.assistant .note"))
        assert "first after" in await asyncio.to_thread(text, browser, ".turn.assistant .note")
        shown = await asyncio.to_thread(text, browser, ".turn.assistant .said .muted")
        assert shown == "A thought."
        assert await asyncio.to_thread(problems, browser) == []
        await asyncio.to_thread(browser.get, "about:blank")
