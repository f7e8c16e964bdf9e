"""`tandem status` and `tandem drain` of a service that has been replaced: its old URL goes on to
do.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.cluster.cli.main import app
from tandem.cluster.serve.identity_file import kept_identity
from tandem.cluster.service_url import ServiceAccess
from tandem.proto.errors import NotFound, Unavailable
from tandem.tests.peers import IDENTITY
from tandem.tests.status_proxy import Proxy, serving_proxy


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with serving_proxy() as running:
        yield running


@pytest.mark.parametrize("asked", ["a", "a/", "a.2", "a.9"])
@pytest.mark.parametrize("deployed", [("a.10",), ("a.11", "a.10"), ("ab.2", "a.10", "a-b", "b")])
def test_the_page_of_a_replaced_service_is_that_of_its_successor(
    proxy: Proxy, asked: str, deployed: tuple[str, ...]
) -> None:
    proxy.deploy(*deployed)
    url, page = ServiceAccess(url=f"{proxy.root}/{asked}").status()
    assert (url, page["service"]) == (f"{proxy.root}/a.10", "a.10")


def test_the_named_page_is_taken_while_it_is_there(proxy: Proxy) -> None:
    proxy.deploy("a", "a.2")
    assert [
        ServiceAccess(url=f"{proxy.root}/{name}").status()[1]["service"] for name in ("a", "a.2")
    ] == [
        "a",
        "a.2",
    ]


def test_a_deployment_that_has_just_gone_is_passed_over(proxy: Proxy) -> None:
    proxy.deploy("a.2", "a.3")
    del proxy.pages["/a.2"]
    assert ServiceAccess(url=f"{proxy.root}/a").status()[0] == f"{proxy.root}/a.3"


@pytest.mark.parametrize("routes", [None, 7, [], ["/b"], {"/b": "b"}])
def test_a_service_that_is_not_there_is_one_line(proxy: Proxy, routes: object) -> None:
    proxy.pages["/-/routes"] = routes
    proxy.routes = routes  # type: ignore[assignment]
    url = f"{proxy.root}/a"
    with pytest.raises(Unavailable, match=f"^no service answers at {url}: Not Found;.*--url$"):
        ServiceAccess(url=url).status()


def test_status_and_drain_take_the_old_url(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The identity that `tandem drain` needs is that of the deployment which is there."""
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path))
    proxy.deploy("a.2")
    old = f"{proxy.root}/a"
    assert CliRunner().invoke(app, ["status", "--url", old]).stdout.startswith("a.2: m")
    worker = {"id": "w", "address": "127.0.0.1:1"}
    proxy.pages["/a.2"] = {"workers": [worker]}
    missing = CliRunner().invoke(app, ["drain", "all", "--url", old])
    assert isinstance(missing.exception, NotFound)
    with kept_identity(IDENTITY, f"{proxy.root}/a.2"):
        drained = CliRunner().invoke(app, ["drain", "all", "--url", old, "--timeout", "0"])
    assert drained.stdout == "w: no answer\n"
