"""Checks constraints, in a process of its own that constraint.py starts."""

import json
import signal
import sys
from functools import partial
from multiprocessing.connection import Connection

from ...proto import inference_pb2
from ...proto.deep_stack import on_deep_stack
from .constraint import check_constraint


def main() -> None:
    """Answers one request after the other until the other end of the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is the service's to handle
    connection = Connection(int(sys.argv[1]))
    connection.send_bytes(b"ready")
    while True:
        try:
            constraint = inference_pb2.Constraint.FromString(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(json.dumps(on_deep_stack(partial(check_constraint, constraint))).encode())


if __name__ == "__main__":
    main()
