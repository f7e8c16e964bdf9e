"""Records requests in a file, in Mooncake's form, for a replay with `tandem bench --trace`.

A thread computes the hashes and writes, so the event loop only puts a request into a queue. The
queue and the file have bounds; what exceeds them is not recorded, and a warning says so.
"""

import hmac
import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Final

from ....proto.errors import InvalidArgument
from ....proto.hashing import hash_block, hash_chain, hash_root
from ....router.telemetry.requests import EndedRequest
from ...traces.read import MOONCAKE_BLOCK_TOKENS

_log = logging.getLogger(__name__)

_MAX_QUEUED: Final = 1_024  # requests, each with its prompt
_CLOSE_SECONDS: Final = 2.0
_MB: Final = 1_000_000
_HASH_BYTES: Final = 8
_HASH_SHIFT: Final = 11  # leaves 53 bits, which every reader of JSON keeps


class TraceRecorder:
    """Appends a line to a file for each request that has generated tokens.

    Several routers of a host may append to one file.
    """

    def __init__(
        self,
        path: Path,
        *,
        salt: bytes,
        block_tokens: int = MOONCAKE_BLOCK_TOKENS,
        max_mb: float = 1_000.0,
        has_tenants: bool = False,
    ) -> None:
        """Opens the file, which only its owner may read if it is new.

        `salt`: of the hashes, the same in all routers of the service. `has_tenants`: write the
        tenant of each request. Raises InvalidArgument if the file cannot be opened.
        """
        self._salt = hmac.digest(salt, b"tandem trace file", "sha256")
        self._block_tokens = block_tokens
        self._has_tenants = has_tenants
        self._max_bytes = max_mb * _MB
        self._path = path
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidArgument(f"{path}: {error.strerror}", "router.trace_file") from None
        self._queue: Queue[EndedRequest | None] = Queue(_MAX_QUEUED)
        self._is_over = False  # nothing more is written
        self._has_dropped = False
        self._thread = Thread(target=self._run, name="trace file", daemon=True)
        self._thread.start()

    def record(self, ended: EndedRequest) -> None:
        """Records a request, unless it has generated nothing or began at another router."""
        if self._is_over or not ended.longest_choice or not ended.facts.prompt:
            return
        try:
            self._queue.put_nowait(ended)
        except Full:
            if not self._has_dropped:
                _log.warning(
                    "%s (router.trace_file): some requests are missing: they end too fast",
                    self._path,
                )
            self._has_dropped = True

    def close(self) -> None:
        """Writes the queued requests, and closes the file."""
        with suppress(Full):
            self._queue.put(None, timeout=_CLOSE_SECONDS)
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while (ended := self._queue.get()) is not None:
            if not self._is_over:
                self._write(self._line(ended))
        os.close(self._file)

    def _write(self, line: bytes) -> None:
        """Appends a line by one call, so that the lines of several routers do not mix."""
        try:
            if os.fstat(self._file).st_size + len(line) <= self._max_bytes:
                os.write(self._file, line)
                return
            problem = "it has reached router.trace_max_mb"
        except OSError as error:
            problem = error.strerror or "it cannot be written"
        self._is_over = True
        _log.warning("%s: no more requests are recorded: %s", self._path, problem)

    def _line(self, ended: EndedRequest) -> bytes:
        facts = ended.facts
        salt = hmac.digest(self._salt, facts.prefix_salt, "sha256")
        line: dict[str, object] = {
            "timestamp": round(1000 * facts.began),
            "input_length": facts.num_prompt,
            "output_length": ended.longest_choice,
            "hash_ids": hash_ids(facts.prompt, self._block_tokens, salt),
        }
        if self._block_tokens != MOONCAKE_BLOCK_TOKENS:
            line["block_size"] = self._block_tokens
        if self._has_tenants:
            line["tenant"] = facts.tenant
        return json.dumps(line).encode() + b"\n"


def hash_ids(prompt: Sequence[int], block_tokens: int, salt: bytes) -> list[int]:
    """Returns a salted hash for each block of a prompt; the last block may be partial.

    A hash depends on all tokens up to the end of its block.
    """
    chain = hash_chain(prompt, block_tokens, salt)
    if rest := len(prompt) % block_tokens:
        parent = chain[-1] if chain else hash_root(salt)
        chain.append(hash_block(parent, prompt[-rest:]))
    return [int.from_bytes(each[:_HASH_BYTES], "big") >> _HASH_SHIFT for each in chain]
