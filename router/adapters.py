"""Registers the LoRA adapters of a service, and loads and unloads them while it runs.

Knows nothing of the files of an adapter: its owner passes the functions that read and try one.
"""

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Final, NoReturn

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ..proto.errors import InvalidArgument, NotFound, Overloaded, PermissionDenied
from .auth.authenticator import Caller
from .fields import matching
from .request import LoraAdapter

_log = logging.getLogger(__name__)

MAX_ADAPTERS: Final = 1_024
"""The maximum of served adapters, and of remembered names that were unloaded."""

_NAME: Final = r"[a-zA-Z0-9_][a-zA-Z0-9_.:/@+-]{0,127}"
_NAME_WORDS: Final = (
    "1 to 128 letters, digits and characters of _ . : / @ + -, with a letter, digit or _ first"
)

AdapterName = Annotated[str, matching(_NAME, _NAME_WORDS)]

Shared = Mapping[str, tuple[int, LoraAdapter | None]]
"""By name: the number of its last change, and the adapter; None if it was unloaded."""


class LoraConfig(BaseModel):
    """Configures LoRA adapters."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_loras: int = Field(default=8, ge=1, le=1024)  # adapters that a worker holds at once
    max_lora_rank: int = Field(default=64, ge=1, le=1024)
    # Operators may load adapters from the folders below this one, which has the same path on every
    # node; None: adapters cannot be loaded while the service runs.
    folder: (
        Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(os.path.abspath)] | None
    ) = None


class AdapterRegistry:
    """Holds the adapters of a service by name, as one of its routers knows them.

    Routers share the changes that they make while they run; of two changes of a name the one with
    the higher number counts. A change has precedence over the configured adapter, also in a version
    that replaces this one. Awaits nothing.
    """

    def __init__(
        self, configured: Iterable[LoraAdapter] = (), folders: Iterable[Path] | None = None
    ) -> None:
        """Serves no adapters of changes outside of these resolved folders; None: all are served."""
        # Called after a change that this router has made.
        self.on_news: Callable[[], object] = lambda: None
        self._configured = {adapter.name: adapter for adapter in configured}
        self._folders = None if folders is None else frozenset(folders)
        self._changes: dict[str, tuple[int, LoraAdapter | None]] = {}
        self._served = dict(self._configured)

    @property
    def adapters(self) -> list[LoraAdapter]:
        """All served adapters, ordered by name."""
        return [self._served[name] for name in sorted(self._served)]

    def get(self, name: str) -> LoraAdapter | None:
        """Returns the adapter of this name; None if it is not served."""
        return self._served.get(name)

    def put(self, adapter: LoraAdapter) -> None:
        """Begins to serve an adapter, in place of one of this name.

        Raises Overloaded if there are too many.
        """
        if self.get(adapter.name) is None and len(self._served) >= MAX_ADAPTERS:
            raise Overloaded(f"{MAX_ADAPTERS} adapters are served; unload one first")
        self._change(adapter.name, adapter)

    def remove(self, name: str) -> None:
        """Stops serving an adapter; its running requests finish."""
        self._change(name, None)

    def shared(self) -> Shared:
        """Returns the changes, for other routers."""
        return dict(self._changes)

    def learn(self, shared: Shared) -> bool:
        """Applies another router's changes. Returns True if any was new.

        Warns of each that has precedence over a configured adapter, and of each adapter that this
        router does not serve.
        """
        newer = {
            name: change
            for name, change in shared.items()
            if _order(change) > _order(self._changes.get(name))
        }
        self._changes |= newer
        for name, (_, adapter) in newer.items():
            self._apply(name, adapter)
            self._warn(name, adapter)
        self._forget()
        return not newer.keys().isdisjoint(self._changes)

    def _change(self, name: str, adapter: LoraAdapter | None) -> None:
        number = 1 + max((number for number, _ in self._changes.values()), default=0)
        self._changes[name] = number, adapter
        self._apply(name, adapter)
        self._forget()
        self.on_news()

    def _apply(self, name: str, adapter: LoraAdapter | None) -> None:
        """Serves the adapter of a change; None: serves none of this name."""
        if adapter is not None and self._is_outside(adapter):
            adapter = self._configured.get(name)
        if adapter is None:
            self._served.pop(name, None)
        else:
            self._served[name] = adapter

    def _is_outside(self, adapter: LoraAdapter) -> bool:
        """Returns True if the workers would refuse the adapter's folder."""
        folder = Path(adapter.folder)
        return self._folders is not None and self._folders.isdisjoint((folder, *folder.parents))

    def _warn(self, name: str, adapter: LoraAdapter | None) -> None:
        configured = self._configured.get(name)
        if adapter is not None and self._is_outside(adapter):
            _log.warning(
                "the adapter %s, loaded at run time, is not served: its folder %s is outside of "
                "lora.folder and of the folders in adapters",
                name,
                adapter.folder,
            )
        elif configured is not None and (
            adapter is None or adapter.fingerprint != configured.fingerprint
        ):
            _log.warning(
                "adapters.%s: the folder %s is not served, because the adapter was %s at run time; "
                "load this folder at run time to serve it",
                name,
                configured.folder,
                f"loaded from {adapter.folder}" if adapter else "unloaded",
            )

    def _forget(self) -> None:
        """Forgets the oldest unloaded adapters, unless configured: all routers know of them."""
        unloaded = [
            (number, name)
            for name, (number, adapter) in self._changes.items()
            if adapter is None and name not in self._configured
        ]
        for _, name in sorted(unloaded)[: max(len(unloaded) - MAX_ADAPTERS, 0)]:
            del self._changes[name]


def _order(change: tuple[int, LoraAdapter | None] | None) -> tuple[int, bytes]:
    if change is None:
        return 0, b""
    number, adapter = change
    return number, adapter.fingerprint if adapter else b""


class AdapterAdmin:
    """Loads and unloads adapters for callers that are allowed to."""

    def __init__(
        self,
        registry: AdapterRegistry,
        *,
        folder: str | None = None,
        read: Callable[[str, Path], LoraAdapter] = lambda name, folder: _refuse(),
        try_on_workers: Callable[[LoraAdapter], Awaitable[None]] = lambda adapter: _refuse(),
    ) -> None:
        """Loads adapters from folders below `folder`; without it, loads none.

        `read` runs in a thread and returns the adapter in a folder; `try_on_workers` makes the
        workers load it. Both raise InvalidArgument for an adapter that cannot be used.
        """
        self.registry = registry
        self._folder = None if folder is None else Path(folder).resolve()
        self._read = read
        self._try_on_workers = try_on_workers
        self._changing = asyncio.Lock()

    async def load(self, caller: Caller, name: str, path: str, taken: Collection[str] = ()) -> None:
        """Begins to serve the adapter in the folder `path` as `name`.

        `path` is absolute or relative to the configured folder, and lies below it; `name` must not
        be in `taken`. Raises PermissionDenied, InvalidArgument or Overloaded.
        """
        root = self._root(caller)
        if not re.fullmatch(_NAME, name):
            raise InvalidArgument(f"must be {_NAME_WORDS}", "lora_name")
        async with self._changing:
            if name in taken or self.registry.get(name):
                raise InvalidArgument(f"{name!r} is served already; unload it first", "lora_name")
            folder = await asyncio.to_thread(_below, root, path)
            adapter = await asyncio.to_thread(self._read, name, folder)
            await self._try_on_workers(adapter)
            self.registry.put(adapter)

    async def unload(self, caller: Caller, name: str) -> None:
        """Stops serving an adapter; its running requests finish.

        Raises PermissionDenied or NotFound.
        """
        self._root(caller)
        async with self._changing:
            if not self.registry.get(name):
                raise NotFound("lora_name: no adapter of this name is served")
            self.registry.remove(name)

    def _root(self, caller: Caller) -> Path:
        """Returns the configured folder. Raises PermissionDenied unless the caller may use it."""
        if self._folder is None:
            _refuse()
        if not caller.sees_all:
            raise PermissionDenied("only an operator's key may change adapters")
        return self._folder


def _refuse() -> NoReturn:
    raise PermissionDenied("adapters cannot be changed while the service runs (lora.folder)")


def _below(root: Path, path: str) -> Path:
    """Resolves `path` and its links. Raises InvalidArgument unless it is a folder below `root`."""
    wrong = InvalidArgument(
        "must name a folder below the one that is configured (lora.folder)", "lora_path"
    )
    try:
        folder = (root / path).resolve()
        if folder.is_relative_to(root) and folder != root and folder.is_dir():
            return folder
    except (OSError, ValueError, RuntimeError):  # too long, a zero byte, a loop of links
        raise wrong from None
    raise wrong
