"""Runs `tandem serve` as a process of its own."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Final

import yaml

from tandem.proto.addresses import free_port

_END_SECONDS: Final = 30.0
_HOST: Final = "127.0.0.1"


@contextmanager
def running_service(config: Mapping[str, object], most_seconds: float = 240.0) -> Iterator[str]:
    """Starts a service with a configuration; yields the URL of its gRPC API, and stops it.

    Kills it after `most_seconds`. Raises RuntimeError, with the end of its output, if it does not
    start.
    """
    router = {"grpc_port": 0, "http_port": 0, "ops_port": 0}
    own = {"name": f"learn-{os.getpid()}", "status_port": free_port(_HOST), "router": router}
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "stderr").open("w+") as log:
        file = Path(folder) / "service.yaml"
        file.write_text(yaml.safe_dump({**own, **config}))
        command = [str(Path(sys.executable).with_name("tandem")), "serve", "--config", str(file)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        Thread(target=_kill_late, args=(server, most_seconds), daemon=True).start()
        try:
            assert server.stdout is not None
            line = next((each for each in server.stdout if each.startswith("tandem ready")), "")
            address = re.search(r"grpc=([^ ,]+)", line)
            if address is None:
                log.seek(0)
                raise RuntimeError(f"the service did not start: {log.read()[-2000:]}")
            yield f"grpc://{address[1]}"
        finally:
            _stop(server)


def _stop(server: "subprocess.Popen[str]") -> None:
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _kill_late(server: "subprocess.Popen[str]", most_seconds: float) -> None:
    """Ends a server that runs for too long; the reader of its output then gets the end."""
    try:
        server.wait(most_seconds)
    except subprocess.TimeoutExpired:
        server.kill()
