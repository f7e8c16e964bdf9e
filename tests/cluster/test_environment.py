"""Tests how a start uses the environment: Ray's address and token, proxies, temporary folders."""

import os
import resource
import tempfile
from pathlib import Path

import pytest

from tandem.cluster.serve.environment import (
    MAX_TMPDIR_BYTES,
    cluster_address,
    prepare_ray_environment,
    ray_scratch,
)
from tandem.proto.errors import InvalidArgument, Unavailable

RAY = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the test in an environment without these variables."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in (*RAY, *PROXIES, *map(str.upper, PROXIES)):
        os.environ.pop(name, None)


@pytest.mark.parametrize("given", ["", " ", "local"])
@pytest.mark.parametrize("option", [None, "", "local"])
def test_an_empty_address_is_none(given: str, option: str | None) -> None:
    os.environ["RAY_ADDRESS"] = given
    assert cluster_address(option) is None
    assert "RAY_ADDRESS" not in os.environ


def test_the_option_wins_over_the_variable() -> None:
    os.environ["RAY_ADDRESS"] = "other:6379"
    assert cluster_address(None) == "other:6379"
    for address in ("auto", "head:6379", "[::1]:6379", "10.0.0.1:6379"):
        assert cluster_address(address) == address


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("http://127.0.0.1:8265", "is an address of Ray's dashboard and jobs; give HOST:PORT"),
        ("ray://head:10001", "is an address of Ray Client; give HOST:PORT"),
        ("head", "is not HOST:PORT"),
        ("head:", "is not HOST:PORT"),
        ("head:gcs", "is not HOST:PORT"),
        ("head:70000", "is not HOST:PORT"),
        (":6379", "is not HOST:PORT"),
        ("head/x:6379", "is not HOST:PORT"),
    ],
)
def test_other_addresses_are_refused_by_the_name_of_who_gave_them(
    address: str, reason: str
) -> None:
    with pytest.raises(InvalidArgument, match=r"^--address: .*") as refused:
        cluster_address(address)
    assert reason in str(refused.value)
    os.environ["RAY_ADDRESS"] = address
    with pytest.raises(InvalidArgument, match=r"^RAY_ADDRESS: .*unset it to start") as refused:
        prepare_ray_environment(None)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"RAY_AUTH_MODE": "yes"}, "RAY_AUTH_MODE: must be one of disabled, token, k8s, got 'yes'"),
        (
            {"RAY_AUTH_TOKEN_PATH": "/nowhere/token"},
            "RAY_AUTH_TOKEN_PATH: /nowhere/token cannot be",
        ),
        ({"RAY_AUTH_TOKEN_PATH": os.devnull}, "RAY_AUTH_TOKEN_PATH: /dev/null is empty"),
    ],
)
def test_authentication_at_which_ray_would_abort(variables: dict[str, str], reason: str) -> None:
    os.environ.update(variables)
    with pytest.raises(InvalidArgument, match=reason):
        prepare_ray_environment(None)


def test_authentication_without_a_value_is_as_if_not_set(tmp_path: Path) -> None:
    os.environ.update({"RAY_AUTH_MODE": "", "RAY_AUTH_TOKEN": " ", "RAY_AUTH_TOKEN_PATH": ""})
    assert prepare_ray_environment(None) is None
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()


@pytest.mark.parametrize("proxy", PROXIES[:-1])
def test_loopback_never_goes_through_a_proxy(proxy: str) -> None:
    prepare_ray_environment(None)
    assert "no_proxy" not in os.environ
    for name in (proxy, proxy.upper()):
        os.environ[name] = "http://proxy.example:3128"
        os.environ["NO_PROXY"] = "intern.example, 10.0.0.0/8"
        os.environ.pop("no_proxy", None)
        for _ in range(2):
            prepare_ray_environment(None)
            expected = "intern.example,10.0.0.0/8,localhost,127.0.0.1,::1"
            assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == expected
        del os.environ[name]


def test_no_proxy_for_any_host_stays() -> None:
    os.environ |= {"http_proxy": "http://proxy.example:3128", "no_proxy": "*"}
    prepare_ray_environment(None)
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "*"


def test_a_working_folder_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(InvalidArgument, match=r"^the working folder cannot be used .*; change to"):
        prepare_ray_environment(None)


def test_the_folder_of_ray_leaves_room_for_the_names_of_its_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the path of TMPDIR is too long, the folder is in one of the system's folders."""
    long = tmp_path / ("x" * MAX_TMPDIR_BYTES)
    long.mkdir()
    short = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    try:
        for wanted, expected in (
            (long, Path("/tmp")),
            (short, short),
            (short / "missing", Path("/tmp")),
        ):
            os.environ["RAY_TMPDIR"] = str(wanted)
            monkeypatch.setattr(tempfile, "tempdir", str(long))
            with ray_scratch() as scratch:
                assert Path(scratch).parent == expected
                socket_path = (
                    f"{scratch}/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
                )
                assert len(socket_path) <= 107
            assert not Path(scratch).exists()
    finally:
        short.rmdir()


def test_no_folder_for_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(prefix: str, dir: str) -> str:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tandem.cluster.serve.environment.mkdtemp", refuse)
    with (
        pytest.raises(
            Unavailable, match=r"^TMPDIR: .*that can be written .*Read-only file"
        ) as refused,
        ray_scratch(),
    ):
        pass
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "set_to"), [("", ""), ("0", "0"), ("1", "1"), ("2", "1"), ("yes", "1")]
)
def test_processes_of_ray_keep_their_docstrings(given: str, set_to: str) -> None:
    os.environ["PYTHONOPTIMIZE"] = given
    prepare_ray_environment(None)
    assert os.environ["PYTHONOPTIMIZE"] == set_to


def test_limits_of_open_files_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {
        resource.RLIMIT_NOFILE: (256, 4_096),
        resource.RLIMIT_AS: (resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    }
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    prepare_ray_environment(None)
    assert limits[resource.RLIMIT_NOFILE] == (4_096, 4_096)
    limits[resource.RLIMIT_NOFILE] = (100_000, resource.RLIM_INFINITY)
    prepare_ray_environment(None)
    assert limits[resource.RLIMIT_NOFILE] == (100_000, resource.RLIM_INFINITY)
    limits[resource.RLIMIT_AS] = (2**30, 2**30)
    with pytest.raises(InvalidArgument, match=r"^RLIMIT_AS: 1024 MiB .*\(ulimit -v unlimited\)$"):
        prepare_ray_environment(None)
    limits[resource.RLIMIT_NOFILE] = (64, 64)
    with pytest.raises(InvalidArgument, match=r"^RLIMIT_NOFILE: 64 open files .*\(ulimit -n\)$"):
        prepare_ray_environment(None)
