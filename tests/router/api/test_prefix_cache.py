"""POST /reset_prefix_cache: who may, and what it answers."""

from collections.abc import Mapping

import httpx
import pytest

from tandem.router.api.server.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.auth.authenticator import Authenticator
from tandem.router.frontend.served_model import ServedModel
from tandem.tests.router.auth.keys import api_key, bearer
from tandem.tests.router.fake_source import FakeTokenSource
from tandem.tests.waits import WAIT


async def ask(
    model: ServedModel, failed: Mapping[str, str], headers: dict[str, str], keys: Authenticator
) -> tuple[httpx.Response, int]:
    """Returns the answer, and how often the caches were reset."""
    num_resets = 0

    async def reset() -> Mapping[str, str]:
        nonlocal num_resets
        num_resets += 1
        return failed

    servers = await ApiServers.start(
        GenerationService([model], FakeTokenSource(), reset_cache=reset), authenticator=keys
    )
    try:
        url = f"http://{servers.http_address}/reset_prefix_cache?reset_external=true"
        async with httpx.AsyncClient(headers=headers, timeout=WAIT) as client:
            return await client.post(url), num_resets
    finally:
        await servers.stop(0)


def keyed() -> Authenticator:
    return Authenticator([api_key("ada", operator=True), api_key("bob")])


@pytest.mark.parametrize("failed", [{}, {"d0": "no answer"}])
async def test_an_operator_resets_and_hears_of_workers_that_failed(
    model: ServedModel, failed: dict[str, str]
) -> None:
    answer, num_resets = await ask(model, failed, bearer("ada"), keyed())
    assert (answer.status_code, num_resets) == (200, 1)
    assert answer.json() == {"success": not failed, "failed": failed}


@pytest.mark.parametrize("sees_all", [False, True])
async def test_without_keys_only_a_service_on_loopback_is_reset(
    model: ServedModel, sees_all: bool
) -> None:
    answer, num_resets = await ask(model, {}, {}, Authenticator(anonymous_sees_all=sees_all))
    assert (answer.status_code, num_resets) == ((200, 1) if sees_all else (403, 0))


async def test_no_other_key_and_no_page_resets(model: ServedModel) -> None:
    for headers in (bearer("bob"), bearer("ada") | {"origin": "https://elsewhere.example"}):
        answer, num_resets = await ask(model, {}, headers, keyed())
        assert (answer.status_code, num_resets) == (403, 0)
