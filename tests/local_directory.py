"""Calls a directory that lives in this process, without Ray."""

from typing import Any

from tandem.cluster.serve.directory import DirectoryClient
from tandem.cluster.serve.members import Directory


class LocalDirectory(DirectoryClient):
    """A DirectoryClient whose calls go to an object."""

    def __init__(self, directory: Directory) -> None:
        super().__init__("local")
        self._directory = directory

    async def _call(self, method: str, *args: object, wait: float = 0.0) -> Any:
        return await getattr(self._directory, method)(*args)
