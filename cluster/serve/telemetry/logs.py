"""Writes logs as lines of JSON, each with its request id and trace id."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from ....router.telemetry.requests import PARTS, EndedRequest
from ....router.telemetry.trace import CURRENT_REQUEST

_REQUESTS: Final = logging.getLogger("tandem.requests")
_FIELDS: Final = "tandem_fields"
_NAMES: Final = (
    *(f"{part}_seconds" for part in PARTS),
    "end_to_end_seconds",
    "ttft_seconds",
    "tpot_seconds",
    "attempts",
    "cached_tokens",
    "prefill_worker",
    "decode_worker",
    "kv_transport",
    "kv_transfer_bytes",
)


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON.

    Its fields: time, level, logger, message, the ids of the request and the trace if there are any,
    and further fields of the record.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id, trace_id = CURRENT_REQUEST.get()
        line |= {"request_id": request_id} if request_id else {}
        line |= {"trace_id": trace_id} if trace_id else {}
        line |= getattr(record, _FIELDS, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def write_json_logs(stream: TextIO | None = None) -> None:
    """Makes all of Tandem's loggers write JSON to `stream`, by default stderr, from level INFO on.

    Idempotent.
    """
    logger = logging.getLogger("tandem")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def log_request(ended: EndedRequest) -> None:
    """Logs a line about a request that has ended: its timeline, nothing of its text.

    Logs nothing about a request that was refused.
    """
    if ended.was_refused:
        return
    facts = ended.facts
    trace = facts.trace
    fields: dict[str, Any] = {
        "request_id": facts.request_id,
        "prompt_tokens": facts.num_prompt,
        "completion_tokens": ended.num_generated,
        "finish_reasons": ended.finish_reasons,
    }
    fields |= {"trace_id": trace.trace_id} if trace else {}
    fields |= {"error": ended.error} if ended.error else {}
    for name in _NAMES:
        value = getattr(ended.timeline, name)
        fields[name] = round(value, 6) if isinstance(value, float) else value
    _REQUESTS.info("request ended", extra={_FIELDS: fields})
