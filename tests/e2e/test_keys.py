"""Tests a service with API keys on a Ray cluster: its console in a real browser, who is let in,
whose prefixes are cached, a key that is revoked while its streams run, and a deployment with
another key. One file, because all of it needs one service.

The browser walks the console under load, light and dark, wide and narrow, and by keyboard.
"""

import asyncio
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from tandem.cluster.given_keys import hash_given_keys
from tandem.proto.errors import Unauthenticated
from tandem.router.auth.keys import create_key, revoke_key
from tandem.router.client.client import Client
from tandem.tests.browser import (
    chromium,
    count,
    paint_times,
    polls,
    problems,
    set_window,
    shown,
    text,
    wait,
)
from tandem.tests.service import expected_tokens, small_config, wait_until_idle
from tandem.tests.waits import WAIT

VIEWS = ("overview", "requests", "recoveries", "playground")
PROMPT = [(17 * i) % 400 + 3 for i in range(100)]
NUM_TOKENS = 400
NUM_STREAMS = 16


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def keys(keys_file: Path) -> dict[str, str]:
    """Makes the keys of two tenants and of an operator; returns them by their names."""
    return {
        name: create_key(keys_file, name=name, tenant=name, operator=name == "ops")
        for name in ("ada", "bob", "ops")
    }


@pytest.fixture(scope="module")
def service(address: str, tiny_model: Path, keys_file: Path, keys: dict[str, str]) -> Iterator[Any]:
    from tandem.cluster.serve.launch import start_service

    overrides: dict[str, object] = {"router.resources": {"router": 1.0}}
    overrides |= {"auth.keys_file": str(keys_file), "router.local_prefill_tokens": 0}
    with start_service(
        small_config(tiny_model, "keys", overrides), str(tiny_model), address=address
    ) as running:
        yield running


@pytest.fixture(scope="module")
def page(service: Any) -> Iterator[Any]:
    """A browser that shows the console, and its dialog that asks for a key."""
    with chromium() as driver:
        set_window(driver, 1280)
        driver.get(service.console_url)
        yield driver


@pytest.fixture(scope="module")
def opened(page: Any, keys: dict[str, str]) -> Any:
    """The same, with the operator's key."""
    wait(lambda: text(page, "#live") in ("Key needed", "Live"))
    if text(page, "#live") != "Live":
        page.find_element("id", "key-input").send_keys(keys["ops"] + "\n")
        wait(lambda: text(page, "#live") == "Live")
        problems(page)  # of the poll without a key
    return page


@contextmanager
def load(service: Any, key: str, streams: int = 4) -> Iterator[None]:
    """Keeps so many streams running."""
    ends = threading.Event()

    def stream() -> None:
        with Client(service.grpc_address, api_key=key) as client:
            while not ends.is_set():
                client.generate(PROMPT, max_tokens=100, ignore_eos=True, timeout=120)

    with ThreadPoolExecutor(streams) as pool:
        running = [pool.submit(stream) for _ in range(streams)]
        try:
            yield
        finally:
            ends.set()
            for each in running:
                each.result()


def test_it_asks_for_a_key_and_keeps_it_in_the_tab(page: Any, keys: dict[str, str]) -> None:
    key_input = page.find_element("id", "key-input")
    wait(lambda: key_input.is_displayed())
    assert text(page, "#live") == "Key needed"
    assert page.switch_to.active_element == key_input
    key_input.send_keys("tandem-wrong\n")
    wait(lambda: "does not know this key" in text(page, "#key-error"))
    assert count(page, ".worker:not(.head)") == 0
    key_input.send_keys(keys["ops"] + "\n")
    wait(lambda: text(page, "#live") == "Live")
    assert not key_input.is_displayed()
    assert keys["ops"] not in page.page_source + str(page.get_cookies())
    assert page.execute_script("return Object.values(localStorage).join()") == "system"
    refused = [each for each in problems(page) if "401" not in each]
    assert refused == []


def test_the_first_paint_is_measured(page: Any) -> None:
    """`pytest -s` shows it."""
    wait(lambda: "first-contentful-paint" in paint_times(page))
    print(paint_times(page))


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_every_view_under_load(
    opened: Any, service: Any, keys: dict[str, str], theme: str, width: int
) -> None:
    set_window(opened, width, theme=theme)
    with load(service, keys["ops"]):
        for view in VIEWS:
            opened.find_element("id", f"tab-{view}").click()
            wait(lambda: opened.find_element("id", view).is_displayed())  # noqa: B023
            assert opened.execute_script(
                "return document.documentElement.scrollWidth <= innerWidth"
            ), view
            unnamed = [
                each.get_attribute("outerHTML")
                for each in shown(opened, view)
                if not each.accessible_name
            ]
            assert unnamed == []
        opened.find_element("id", "tab-overview").click()
        wait(lambda: text(opened, "#figure-workers b") == "2 / 2")
        wait(lambda: int(text(opened, "#figure-running b") or 0) > 0)
        wait(lambda: count(opened, ".chart .line-output[d]:not([d=''])") > 0)
        assert count(opened, ".worker:not(.head)") == 2
        wait(lambda: count(opened, "#requests div.request") > 0)
        wait(lambda: count(opened, "#requests button.request") > 0)
    background = opened.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background.strip("rgb()").split(","))) < 384) == (theme == "dark")
    assert problems(opened) == []


def test_by_keyboard(opened: Any, service: Any, keys: dict[str, str]) -> None:
    from selenium.webdriver.common.keys import Keys

    set_window(opened, 1280)
    with Client(service.grpc_address, api_key=keys["ops"]) as client:
        client.generate(PROMPT, max_tokens=5, timeout=60)
    opened.find_element("id", "tab-overview").click()
    opened.find_element("id", "tab-overview").send_keys(Keys.ARROW_RIGHT)
    assert opened.switch_to.active_element.get_attribute("id") == "tab-requests"
    wait(lambda: count(opened, "#requests button.request") > 0)
    seen = []
    while "request" not in seen:
        opened.switch_to.active_element.send_keys(Keys.TAB)
        seen.append(opened.switch_to.active_element.get_attribute("class") or "")
        assert len(seen) < 30, seen
        assert (
            opened.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
            == "solid"
        )
    opened.switch_to.active_element.send_keys(Keys.ENTER)
    row = opened.switch_to.active_element
    assert row.get_attribute("aria-expanded") == "true"
    assert count(opened, ".details:not([hidden]) .stages tr") == 8  # seven stages and their sum
    opened.find_element("id", "tab-overview").click()
    chart = opened.find_element("css selector", ".plot")
    chart.send_keys(Keys.ARROW_LEFT)
    assert opened.find_element("css selector", ".chart-note").is_displayed()
    opened.find_element("id", "theme").send_keys(Keys.ENTER)
    assert opened.find_element("tag name", "html").get_attribute("data-theme") == "light"
    for _ in range(2):
        opened.find_element("id", "theme").send_keys(Keys.ENTER)
    assert problems(opened) == []


def test_the_playground_answers(opened: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    opened.find_element("id", "tab-playground").click()
    length = opened.find_element("id", "parameter-max_tokens")
    length.clear()
    length.send_keys("-1")
    message = opened.find_element("id", "message")
    markup = "<img src=x onerror=alert(1)> hello"
    message.send_keys(markup + "\n")
    wait(lambda: "Max tokens" in text(opened, ".compose .problem"))
    length.clear()
    length.send_keys("24")
    message.send_keys("\n")
    wait(lambda: count(opened, ".timeline") == 1)
    assert text(opened, ".turn.user .said") == markup
    assert count(opened, "#playground img") == 0
    assert 0 < count(opened, ".token") <= 24
    assert "token" in text(opened, ".turn.assistant .note")
    opened.find_element("css selector", ".tokens-text").send_keys(Keys.ARROW_RIGHT)
    wait(lambda: "Token 2 of" in text(opened, ".inspector"))
    assert count(opened, ".alternatives li") >= 5
    message.send_keys("and a second question\n")
    wait(lambda: count(opened, ".timeline") == 2)
    assert problems(opened) == []


@pytest.fixture(scope="module")
def counted(service: Any, keys: dict[str, str]) -> None:
    """Waits until the router knows the sizes of the model, which is slow on a busy machine."""
    httpx.get(
        f"{service.console_url}/explain?prompt_tokens=1&output_tokens=1",
        headers={"Authorization": f"Bearer {keys['ops']}"},
        timeout=150,
    ).raise_for_status()


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_playground_explains_a_prompt(opened: Any, theme: str) -> None:
    from selenium.webdriver.common.keys import Keys

    set_window(opened, 1280, theme=theme)
    opened.find_element("id", "tab-playground").click()
    opened.find_element("id", "mode-explain").click()
    assert not opened.find_element("id", "message").is_displayed()
    length = opened.find_element("id", "parameter-max_tokens")
    length.clear()
    length.send_keys("6")
    prompt = opened.find_element("id", "explain-prompt")
    prompt.clear()
    prompt.send_keys("The cat sat")
    opened.find_element("css selector", ".explain button.primary").click()
    wait(lambda: count(opened, ".explained section") == 4)
    pieces = count(opened, ".prompt-tokens .piece")
    sections = [text(opened, f".explained section:nth-child({n})") for n in range(1, 5)]
    prompt_text, shapes, work, steps = sections
    assert f"{pieces} token" in prompt_text
    assert f"1 × {pieces}" in shapes
    assert "logits" in shapes
    assert f"prefill of {pieces} token" in work
    assert "without KV cache" in work
    rows = count(opened, ".explained section:nth-child(4) tbody tr")
    assert 1 <= rows <= 6
    assert count(opened, ".candidates .taken") >= 1
    assert "%" in steps
    opened.find_element("id", "mode-explain").send_keys(Keys.ARROW_LEFT)
    assert opened.find_element("id", "message").is_displayed()
    assert problems(opened) == []


def test_it_does_not_poll_while_its_tab_is_hidden(opened: Any) -> None:
    script = (
        "window.hid = []; document.onvisibilitychange = () => hid.push([document.hidden, "
        "performance.now()])"
    )
    opened.execute_script(f"performance.clearResourceTimings(); {script}")
    wait(lambda: len(polls(opened)) >= 2)
    console = opened.current_window_handle
    opened.switch_to.new_window("tab")
    opened.execute_async_script(
        "setTimeout(arguments[0], 3500)"
    )  # in which a visible page polls at least twice
    opened.close()
    opened.switch_to.window(console)
    wait(lambda: len(opened.execute_script("return hid")) == 2)
    (is_hidden, hidden), (_, shown) = opened.execute_script("return hid")
    assert is_hidden
    assert shown - hidden >= 3000
    assert [time for time in polls(opened) if hidden < time < shown] == []
    wait(lambda: any(time >= shown for time in polls(opened)))
    wait(lambda: text(opened, "#live") == "Live")
    assert problems(opened) == []


def test_it_says_so_when_the_router_does_not_answer(opened: Any) -> None:
    network = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    opened.execute_cdp_cmd("Network.enable", {})
    opened.execute_cdp_cmd("Network.emulateNetworkConditions", network)
    wait(lambda: "cannot be reached" in text(opened, "#banner"))
    opened.execute_cdp_cmd(
        "Network.emulateNetworkConditions",
        network | {"offline": False, "downloadThroughput": -1, "uploadThroughput": -1},
    )
    wait(lambda: text(opened, "#live") == "Live")
    assert not opened.find_element("id", "banner").is_displayed()
    problems(opened)  # of the requests that failed


def test_the_dashboard_command_names_every_page(service: Any, keys: dict[str, str]) -> None:
    from tandem.cluster.cli.main import app

    done = CliRunner().invoke(
        app,
        ["dashboard", "--url", service.status_url],
        env=os.environ | {"TANDEM_API_KEY": keys["ops"]},
    )
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    assert lines[:3] == [
        f"console: {service.console_url}",
        f"status page: {service.status_url}",
        "Ray dashboard: not started; tandem serve --dashboard starts it",
    ]
    port = service.http_addresses[0].rpartition(":")[2]
    assert f"-L {port}:{service.http_addresses[0]}" in lines[-1]


def test_the_usage_of_keys_is_counted(service: Any, keys: dict[str, str]) -> None:
    from tandem.cluster.cli.main import app

    def rows() -> dict[str, list[str]]:
        command = ["key", "usage", "--url", service.status_url]
        done = CliRunner().invoke(app, command, env=os.environ | {"TANDEM_API_KEY": keys["ops"]})
        return {name: rest for name, *rest in map(str.split, done.output.splitlines()[1:])}

    with Client(service.grpc_address, api_key=keys["ops"]) as client:
        client.generate(PROMPT, max_tokens=5, timeout=60)
    wait(lambda: "ops" in rows())  # once the router has reported
    tenant, requests, failed, *tokens = rows()["ops"]
    assert (tenant, failed) == ("ops", "0")
    assert int(requests) > 0
    assert len(tokens) == 3


def code_of(url: str, key: str = "") -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=WAIT) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_only_who_has_a_key_is_let_in(service: Any, keys: dict[str, str]) -> None:
    urls = [f"http://{service.http_addresses[0]}/v1/models", service.status_url]
    assert [code_of(url, key) for url in urls for key in ("", "tandem-wrong", keys["ada"])] == [
        401,
        401,
        200,
    ] * 2
    assert code_of(f"http://{service.http_addresses[0]}/health") == 200


async def test_cached_tokens_of_another_tenant_are_not_seen(
    service: Any, keys: dict[str, str]
) -> None:
    from tandem.router.client.client import AsyncClient

    cached = []
    for name in ("ada", "ada", "bob", "bob"):
        async with AsyncClient(service.grpc_address, api_key=keys[name]) as client:
            answer = await client.generate(PROMPT, max_tokens=2, ignore_eos=True, timeout=60)
            cached.append(answer.usage.cached_tokens > 0)
    assert cached == [False, True, False, True]


async def call_again_and_again(client: Any) -> None:
    """Ends only with an error, or after a minute."""
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        await client.list_models()
        await asyncio.sleep(0.1)


async def test_a_revoked_key_is_refused_and_its_streams_go_on(
    service: Any, tiny_model: Path, keys_file: Path, keys: dict[str, str]
) -> None:
    from tandem.router.client.client import AsyncClient

    options: dict[str, Any] = {
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "timeout": 120,
    }
    async with AsyncClient(service.grpc_address, api_key=keys["ada"]) as client:
        streams = [client.stream(PROMPT, **options) for _ in range(NUM_STREAMS)]
        for stream in streams:
            await anext(stream)
        await asyncio.to_thread(revoke_key, keys_file, "ada")
        with pytest.raises(Unauthenticated):
            await call_again_and_again(client)
        completions = await asyncio.gather(*(stream.completion() for stream in streams))
    (expected,) = expected_tokens(tiny_model, [PROMPT], NUM_TOKENS)
    assert [list(each.token_ids) for each in completions] == [expected] * NUM_STREAMS
    async with AsyncClient(service.grpc_address, api_key=keys["bob"]) as client:
        assert await client.list_models()


def test_nothing_is_left(
    service: Any, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opener = urllib.request.build_opener()
    opener.addheaders = [("Authorization", f"Bearer {keys['ops']}")]
    monkeypatch.setattr("urllib.request.urlopen", opener.open)
    wait_until_idle(service.status_url)


def test_a_deployment_with_another_key_refuses_the_keys_before_it(
    service: Any, address: str, tiny_model: Path, keys: dict[str, str]
) -> None:
    """The addresses stay. `--api-key` sets the hashes; this is the last test, since it replaces
    the service.
    """
    from tandem.cluster.serve.launch import start_service

    urls = [f"http://{service.http_addresses[0]}/v1/models", service.status_url]
    assert [code_of(url, key) for url in urls for key in ("sk-new", keys["bob"])] == [401, 200] * 2
    overrides = {
        "router.resources": {"router": 1.0},
        "auth.key_hashes": hash_given_keys("sk-new", "api_key"),
        "status_port": None,
    }
    config = small_config(tiny_model, "keys", overrides)
    with start_service(config, str(tiny_model), address=address) as replacement:
        assert replacement.http_addresses == service.http_addresses
        urls = [urls[0], replacement.status_url]
        accepted = [code_of(url, key) for url in urls for key in ("sk-new", keys["bob"], "")]
        assert accepted == [200, 401, 401] * 2
        before = Client(replacement.grpc_address, api_key=keys["bob"])
        with before, pytest.raises(Unauthenticated):
            before.list_models()
        with Client(replacement.grpc_address, api_key="sk-new") as client:
            assert client.generate(PROMPT, max_tokens=2, timeout=60)
