"""Drives Debian's Chromium, for tests of the console."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest

from tandem.tests.waits import WAIT

_PROGRAMS: Final = ("chromium", "chromedriver")
_FLAGS: Final = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-dev-shm-usage",
    ),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
    ),
)
START_SECONDS: Final = 60


def missing() -> str:
    """Returns what has to be installed before a browser can be driven; empty if nothing."""
    absent = [program for program in _PROGRAMS if shutil.which(program) is None]
    return (
        f"{' and '.join(absent)} missing: apt-get install chromium chromium-driver"
        if absent
        else ""
    )


@contextmanager
def chromium() -> Iterator[Any]:
    """Runs a browser with a new, empty profile; yields its driver. Skips the test outside CI if
    there is none.
    """
    if reason := missing():
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    with TemporaryDirectory(prefix="tandem-browser-", ignore_cleanup_errors=True) as profile:
        options = Options()
        options.binary_location = str(shutil.which("chromium"))
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            driver.set_page_load_timeout(START_SECONDS)
            driver.set_script_timeout(START_SECONDS)
            yield driver
        finally:
            driver.quit()


def set_window(driver: Any, width: int, height: int = 900, *, theme: str = "light") -> None:
    """Sets the page's size in CSS pixels, also below the least size of a window, and the theme that
    it prefers.
    """
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": theme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def paint_times(driver: Any) -> dict[str, float]:
    """Returns the milliseconds from the start of the page's load to its first paint, and to that of
    its contents.
    """
    script = (
        "return performance.getEntriesByType('paint').map(entry => [entry.name, entry.startTime])"
    )
    return {name: float(time) for name, time in driver.execute_script(script)}


def problems(driver: Any) -> list[str]:
    """Returns what the page has reported as wrong since the last call: errors of scripts, and what
    the policy of its contents has refused.
    """
    return [
        entry["message"]
        for entry in driver.get_log("browser")
        if entry["level"] in ("SEVERE", "WARNING")
    ]


def wait(holds: Callable[[], object]) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + WAIT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def text(page: Any, selector: str) -> str:
    """Returns the text of the first element, also if it is hidden."""
    return str(
        page.execute_script(
            "return document.querySelector(arguments[0])?.textContent ?? ''", selector
        )
    )


def count(page: Any, selector: str) -> int:
    """Returns the number of elements."""
    return int(
        page.execute_script("return document.querySelectorAll(arguments[0]).length", selector)
    )


def shown(page: Any, view: str) -> list[Any]:
    """Returns the visible controls of a view of the console, and those above it."""
    found = page.find_elements(
        "css selector", f".top button, #{view} :is(button, input, textarea, summary, [tabindex])"
    )
    return [each for each in found if each.is_displayed()][:40]


def polls(page: Any) -> list[float]:
    """Returns when the console has polled, in milliseconds of the page's own clock."""
    script = (
        "return performance.getEntriesByType('resource').filter(each => "
        "each.name.includes('/console/data'))"
    )
    return [float(each) for each in page.execute_script(f"{script}.map(each => each.startTime)")]
