"""Converts between KV layouts and their messages."""

from ...proto import worker_pb2
from ..kv_cache.layout import KvLayout


def layout_message(layout: KvLayout) -> worker_pb2.KvLayout:
    """A KV layout as handles and the directory carry it."""
    return worker_pb2.KvLayout(
        num_layers=layout.num_layers,
        num_heads=layout.num_heads,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        model=layout.model,
    )


def parse_layout(message: worker_pb2.KvLayout) -> KvLayout:
    """The inverse of `layout_message`."""
    return KvLayout(
        num_layers=message.num_layers,
        num_heads=message.num_heads,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        dtype=message.dtype,
        model=message.model,
    )
