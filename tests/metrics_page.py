"""Reads what a router or an agent of Ray shows of its metrics."""

import asyncio
import time
from collections.abc import Callable

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tandem.tests.waits import WAIT


class MetricsPage:
    """Holds one answer of /metrics, or several of different routers, whose series add up."""

    def __init__(self, *texts: str) -> None:
        families = [family for text in texts for family in text_string_to_metric_families(text)]
        self.samples: list[Sample] = [sample for family in families for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """Returns the sum of the series with this name and these labels, of which there must be
        one.
        """
        found = [
            each.value
            for each in self.samples
            if each.name == name and labels.items() <= each.labels.items()
        ]
        assert found, f"no series {name} {labels}"
        return sum(found)


async def scrape(*addresses: str) -> MetricsPage:
    """Returns what is shown at these addresses, HOST:PORT."""
    async with httpx.AsyncClient(timeout=WAIT) as http:
        answers = await asyncio.gather(
            *(http.get(f"http://{address}/metrics") for address in addresses)
        )
    assert [answer.status_code for answer in answers] == [200] * len(addresses)
    return MetricsPage(*(answer.text for answer in answers))


async def scrape_until(condition: Callable[[MetricsPage], bool], *addresses: str) -> MetricsPage:
    """Returns the first pages for which the condition holds; fails if there are none."""
    deadline = time.monotonic() + WAIT
    while not condition(page := await scrape(*addresses)):
        assert time.monotonic() < deadline, "\n".join(map(str, page.samples))
        await asyncio.sleep(0.05)
    return page
