"""Writes a line to the logger `tandem.audit` for each refused call.

The line names the API, the client's address, the key and the reason, but nothing of the content.
"""

import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, Literal

from ....proto.metrics import ERRORS, NULL_METRICS, Metrics

_log = logging.getLogger("tandem.audit")

LINES_PER_SECOND: Final = 20.0
MAX_BURST: Final = 100.0
"""Lines. With a limit, a flood of refused calls fills neither the disk nor the event loop."""


class AuditLog:
    """Writes at most LINES_PER_SECOND lines, or MAX_BURST after a silence.

    After lines were left out, the next line has their number.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, metrics: Metrics = NULL_METRICS
    ) -> None:
        self._clock = clock
        self._metrics = metrics
        self._allowance = MAX_BURST
        self._last = clock()
        self._left_out = 0

    def failed(self, api: Literal["grpc", "http"], reason: str) -> None:
        """Counts one call that ends with an error."""
        self._metrics.add(ERRORS, api=api, code=reason)

    def refused(
        self, api: Literal["grpc", "http"], peer: str, reason: str, key_name: str = ""
    ) -> None:
        """Reports one refused call.

        `peer`: an address; `reason`: a gRPC status code or an HTTP status; `key_name`: of the API
        key, "" if the call has no valid key.
        """
        now = self._clock()
        self._allowance = min(MAX_BURST, self._allowance + (now - self._last) * LINES_PER_SECOND)
        self._last = now
        if self._allowance < 1:
            self._left_out += 1
            return
        self._allowance -= 1
        line = {
            "event": "refused",
            "time": datetime.now(UTC).isoformat(),
            "api": api,
            "peer": peer,
            "reason": reason,
        }
        line |= {"key": key_name} if key_name else {}
        line |= {"left_out": str(self._left_out)} if self._left_out else {}
        self._left_out = 0
        _log.warning("%s", json.dumps(line))


def is_refusal(http_status: int) -> bool:
    """Returns True if a response of this status refuses the call; 499 is a client that has left."""
    return 400 <= http_status < 499
