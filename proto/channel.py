"""How Tandem's processes hold gRPC connections to each other."""

from typing import Final

import grpc.aio

SILENCE_SECONDS: Final = 2.5
"""After so long without a word a worker is taken for frozen or cut off: its streams then go on within three seconds."""

_PATIENT_SECONDS: Final = 10.0  # where a lost peer is noticed in another way

PEER_OPTIONS: Final = (
    # Frames and step messages are bounded by their makers.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Pings may come as often as a channel wants, see `_keepalive`.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 300),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 300),
    # A worker that comes back is found again soon.
    ("grpc.min_reconnect_backoff_ms", 2_000),  # how long one try to connect may take
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A port that is taken is an error, and no proxy of the environment stands between two workers.
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
)


def peer_channel(address: str, silence_seconds: float = SILENCE_SECONDS) -> grpc.aio.Channel:
    """A channel to a worker at HOST:PORT; the caller closes it. A peer that is frozen or cut off is noticed after at
    most so long; a dead one at once, by its socket."""
    return grpc.aio.insecure_channel(address, options=PEER_OPTIONS + _keepalive(silence_seconds))


def patient_channel(address: str) -> grpc.aio.Channel:
    """A channel like `peer_channel`, to a peer whose silence is noticed by the streams themselves."""
    return peer_channel(address, _PATIENT_SECONDS)


def is_silence(error: grpc.aio.AioRpcError) -> bool:
    """Returns whether a call ended because the peer was silent: it, or the network, may be frozen."""
    return "ping timeout" in (error.details() or "")


def peer_server() -> grpc.aio.Server:
    """A server for routers and workers; the caller adds services and a port, starts and stops it."""
    return grpc.aio.server(options=PEER_OPTIONS + _keepalive(_PATIENT_SECONDS))


def _keepalive(seconds: float) -> tuple[tuple[str, int], ...]:
    """Has a connection break after at most so long without a word: a ping, when it was silent for 0.4 of it."""
    interval, timeout = round(400 * seconds), round(600 * seconds)
    return (
        ("grpc.keepalive_time_ms", interval),
        ("grpc.keepalive_timeout_ms", timeout),
        ("grpc.http2.ping_timeout_ms", timeout),  # in place of the other, which has no effect while this is a minute
    )


def bind(server: grpc.aio.Server, host: str, port: int) -> str:
    """Gives a server its one interface and port, 0 for a free one; returns HOST:PORT. Raises OSError if it is taken."""
    try:
        return f"{host}:{server.add_insecure_port(f'{host}:{port}')}"
    except RuntimeError as error:
        raise OSError(f"cannot bind {host}:{port}") from error
