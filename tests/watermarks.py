"""Provides one watermark in the forms of engine, worker and router."""

from typing import Final

from tandem.proto import worker_pb2
from tandem.router.watermark.rules import WatermarkRules
from tandem.workers.engine.plan import Watermark

WATERMARK: Final = Watermark(key=bytes(range(16)), gamma=0.25, delta=2.0, context_width=2)
RULES: Final = WatermarkRules(
    key=WATERMARK.key,
    gamma=WATERMARK.gamma,
    delta=WATERMARK.delta,
    context_width=WATERMARK.context_width,
)
MESSAGE: Final[worker_pb2.Watermark] = RULES.message()
