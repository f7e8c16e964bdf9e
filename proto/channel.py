"""How Tandem's processes hold gRPC connections to each other."""

from typing import Final

import grpc.aio

PEER_OPTIONS: Final = (
    # Frames and step messages are bounded by their makers.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A peer that is frozen or cut off is noticed within seconds; a dead one at once, by its socket.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    # A worker that comes back is found again soon.
    ("grpc.min_reconnect_backoff_ms", 2_000),  # how long one try to connect may take
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A port that is taken is an error, and no proxy of the environment stands between two workers.
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
)


def peer_channel(address: str) -> grpc.aio.Channel:
    """A channel to a worker at HOST:PORT; the caller closes it."""
    return grpc.aio.insecure_channel(address, options=PEER_OPTIONS)


def peer_server() -> grpc.aio.Server:
    """A server for routers and workers; the caller adds services and a port, starts and stops it."""
    return grpc.aio.server(options=PEER_OPTIONS)


def bind(server: grpc.aio.Server, host: str, port: int) -> str:
    """Gives a server its one interface and port, 0 for a free one; returns HOST:PORT. Raises OSError if it is taken."""
    try:
        return f"{host}:{server.add_insecure_port(f'{host}:{port}')}"
    except RuntimeError as error:
        raise OSError(f"cannot bind {host}:{port}") from error
