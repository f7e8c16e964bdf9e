"""Process groups of torch.distributed that bind one named interface, without any global state.

Groups of one process know nothing of each other, and `torch.distributed.init_process_group` is never called. Calls here
block, without the interpreter lock: they belong into a thread. What goes wrong is RuntimeError, as torch raises it.
"""

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from torch import distributed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, Store, TCPStore


def listen_store(host: str, size: int, timeout: float) -> "TCPStore":
    """The store at which `size` ranks of one group find each other; it waits for none of them, and listens at `host`
    and its `port` until it is dropped. `timeout` is in seconds, of waits for its keys. Raises OSError if this machine
    has no such interface."""
    with socket.create_server((host, 0)) as server:
        port = server.getsockname()[1]
        # From here on the store closes it. One that listened itself would do so on all interfaces.
        listener = server.detach()
    return distributed.TCPStore(  # type: ignore[attr-defined]
        host, port, size, True, timedelta(seconds=timeout), wait_for_workers=False, master_listen_fd=listener
    )


def join_store(host: str, port: int, timeout: float) -> "TCPStore":
    """The store that another process listens at. Raises RuntimeError if nobody listens there. Torch knows no deadline
    for a listener that is frozen: then this returns, or raises, when it wakes or dies."""
    try:
        # The store's own connect tries again for three times the timeout, and logs a stack trace each time.
        socket.create_connection((host, port), timeout).close()
    except OSError as error:
        raise RuntimeError("no process group at this address") from error
    return distributed.TCPStore(  # type: ignore[attr-defined]
        host, port, None, False, timedelta(seconds=timeout), wait_for_workers=False
    )


def open_group(store: "Store", *, backend: str, rank: int, size: int, host: str, timeout: float) -> "Backend":
    """A group over this store, once all `size` ranks have come; a second one over it needs a PrefixStore.

    `host` is this rank's own interface, which gloo binds. NCCL takes its interface from NCCL_SOCKET_IFNAME, and makes
    its communicator with the first call, on the device of that call's tensor. `timeout` is in seconds, of the wait
    for the others and of every call. Raises ValueError for a backend that this torch lacks."""
    limit = timedelta(seconds=timeout)
    if backend == "gloo":
        gloo = distributed.ProcessGroupGloo
        options = gloo._Options()  # type: ignore[attr-defined]
        options._devices = [gloo.create_device(hostname=host, lazy_init=False)]
        options._timeout = limit
        return gloo(store, rank, size, options)
    if backend != "nccl" or not distributed.is_nccl_available():
        raise ValueError(f"collective backend {backend!r} is not in this build of torch")
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = limit
    store.set(f"rank {rank}", "here")
    store.wait([f"rank {other}" for other in range(size)], limit)
    return distributed.ProcessGroupNCCL(store, rank, size, options)
