"""Takes the pictures of the console that the docs show: `python -m tandem.tests.screenshots
FOLDER`.

Serves the demo model on this machine, with requests that run, and drives Debian's Chromium. Prints
how long the page has taken to its first paint.
"""

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from PIL import Image

from tandem.cluster.cli.demo.command import MODEL
from tandem.cluster.cli.demo.questions import PROMPTS
from tandem.cluster.config import load_config
from tandem.cluster.serve.environment import prepare_ray_environment
from tandem.cluster.store.store import resolve_model
from tandem.router.client.client import Client
from tandem.tests.browser import chromium, paint_times, set_window

LOAD_SECONDS: Final = 120.0
MAX_BYTES: Final = 150_000
WIDE, NARROW = (1280, 800), (390, 800)
PICTURES: Final = (
    ("console-overview", "overview", WIDE, "light"),
    ("console-requests", "requests", WIDE, "dark"),
    ("console-playground", "playground", WIDE, "light"),
    ("console-narrow", "overview", NARROW, "dark"),
)


def main(folder: Path) -> None:
    """Writes one PNG for each of PICTURES."""
    prepare_ray_environment(None)
    from tandem.cluster.serve.launch import (
        start_service,  # imports Ray, which reads the environment
    )

    overrides: dict[str, object] = {
        "model": MODEL,
        "name": "demo",
        "router.grpc_port": 0,
        "router.http_port": 0,
    }
    overrides |= {"router.local_prefill_tokens": 0, "prefill.replicas": 1, "decode.replicas": 2}
    overrides |= {"prefill.num_threads": 1, "decode.num_threads": 1}  # of a machine with few cores
    config = load_config(None, overrides)
    with (
        start_service(config, str(resolve_model(MODEL))) as service,
        _load(service.grpc_address),
        chromium() as driver,
    ):
        set_window(
            driver, *WIDE
        )  # before the page decides whether to fold the playground's parameters
        driver.get(service.console_url)
        print(
            {name: f"{milliseconds:.0f} ms" for name, milliseconds in paint_times(driver).items()}
        )
        time.sleep(LOAD_SECONDS)  # so that the charts have something to show
        for name, view, size, theme in PICTURES:
            set_window(driver, *size, theme=theme)
            driver.find_element("id", f"tab-{view}").click()
            if view == "playground":
                _ask(driver)
            time.sleep(2)  # for a poll after the change
            path = folder / f"{name}.png"
            picture = Image.open(BytesIO(driver.get_screenshot_as_png())).convert("RGB")
            picture.quantize(256).save(path, optimize=True)
            if path.stat().st_size > MAX_BYTES:
                raise SystemExit(f"{path} has more than {MAX_BYTES} bytes")


@contextmanager
def _load(address: str) -> Iterator[None]:
    """Keeps requests of different lengths running."""
    ends = threading.Event()

    def stream(number: int) -> None:
        with Client(address) as client:
            turn = number
            while not ends.is_set():
                text = PROMPTS[turn % len(PROMPTS)] * (1 + turn % 7)
                client.chat(
                    [{"role": "user", "content": text}],
                    max_tokens=20 + 37 * (turn % 5),
                    timeout=120,
                )
                turn += 1
                ends.wait(0.3 * (turn % 4))

    with ThreadPoolExecutor(5) as pool:
        for number in range(5):
            pool.submit(stream, number)
        try:
            yield
        finally:
            ends.set()


def _ask(driver: Any) -> None:
    temperature = driver.find_element("id", "parameter-temperature")
    temperature.clear()
    temperature.send_keys("0")
    driver.find_element("id", "message").send_keys(PROMPTS[0] + "\n")
    deadline = time.monotonic() + 120
    while not driver.find_elements("css selector", ".timeline"):
        if time.monotonic() > deadline:
            raise SystemExit("the playground has no answer")
        time.sleep(0.2)
    driver.find_element("css selector", ".timeline summary").click()
    driver.find_elements("css selector", ".token")[1].click()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
