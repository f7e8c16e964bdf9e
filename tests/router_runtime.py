"""Starts one router of a service, without the service."""

from pathlib import Path
from typing import Any, Final

from tandem.cluster.config import TandemConfig
from tandem.cluster.serve.runtime import RouterRuntime
from tandem.cluster.store.adapters import configured_adapters
from tandem.router.dispatch.blocked_prompts import BlockedPrompts
from tandem.router.storage.local import LocalStorage
from tandem.tests.peers import IDENTITY

HOST: Final = "127.0.0.1"


async def start_router(
    config: TandemConfig, folder: Path, host: str = HOST, **options: Any
) -> RouterRuntime:
    """Starts a router that knows no other router, and no worker; `options` change that."""
    usual: dict[str, Any] = {
        "identity": IDENTITY,
        "resume_key": b"k" * 32,
        "cache_secret": None,
        "num_routers": 1,
        "application": "",
        "workers": (),
        "replaced": (),
        "blocked_prompts": BlockedPrompts(),
        "adapters": configured_adapters(config),
        "describe": _describe,
        "name": "",
        "storage": LocalStorage(),
    }
    return await RouterRuntime.start(config, folder, host, **(usual | options))


async def _describe() -> dict[str, Any]:
    return {"workers": []}
