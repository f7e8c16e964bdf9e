"""Carries KV cache as payload of the transfer's own frames, over gRPC: always available, the
fallback of all others.
"""

from collections.abc import Sequence

from ..kv_cache.layout import KvSpan
from .connector import KvConnector
from .frames import Data


class GrpcConnector(KvConnector):
    """Needs no connection: the frames of a transfer carry its bytes."""

    def offer(self, stream: int, blocks: Sequence[int], span: KvSpan) -> memoryview:
        """Returns the span as payload."""
        return self.context.kv.read(blocks, span)

    async def fetch(
        self, stream: int, blocks: Sequence[int], data: Data, payload: memoryview
    ) -> memoryview:
        """Returns the payload."""
        return payload
