"""Tests how the benchmark of starts recognizes the processes of a service."""

import pytest

from tandem.tests.bench.startup import role_of


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("/venv/bin/python /venv/bin/tandem serve m", "tandem serve"),
        ("/venv/ray/core/src/ray/raylet/raylet --raylet_socket_name=x", "Ray: raylet"),
        ("ray::ServeController.listen_for_change", "Serve: controller"),
        ("ray::SERVE_REPLICA::tandem#DecodePool#abc:ServeReplica", "decode worker"),
        ("ray::ServeReplica:tandem:PrefillPool", "prefill worker"),
        ("ray::ServeReplica:tandem:Router.check_health", "router"),
        ("ray::IDLE", ""),
    ],
)
def test_the_role_of_a_process_is_found(command: str, role: str) -> None:
    assert role_of(command) == role
