"""One way to name a running service: which address a URL is, and which others it leads to."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.cluster import service_url
from tandem.cluster.bench.options import ServerAddress
from tandem.cluster.bench.target import open_target
from tandem.cluster.cli.main import app
from tandem.cluster.local.batch_senders import service_sender
from tandem.cluster.serve.identity_file import kept_identity
from tandem.cluster.service_url import ServiceAccess
from tandem.proto.errors import InvalidArgument, NotFound, TandemError, Unauthenticated, Unavailable
from tandem.router.api.console.feed import ConsoleFeed
from tandem.router.api.server.ops_server import OpsServer
from tandem.router.api.server.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.auth.authenticator import Authenticator
from tandem.router.auth.tls import ServerTls, TlsConfig
from tandem.router.client import AsyncClient, ClientTls
from tandem.router.frontend.served_model import ServedModel
from tandem.tests.certificates import make_certificate
from tandem.tests.peers import IDENTITY
from tandem.tests.router.auth.keys import api_key
from tandem.tests.router.fake_source import FakeTokenSource, byte_tokenizer
from tandem.tests.status_proxy import Proxy, serving_proxy

KEY = "ada"
BENCH = ("--num-prompts", "2", "--concurrency", "1", "--vocab-size", "250", "--output-len", "2")


class SmallService:
    """Runs one router's real servers over a fake source, and the status page beside them."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.scheme = "http"
        self.workers: list[dict[str, Any]] = []

    async def start(
        self, authenticator: Authenticator | None = None, tls: ServerTls | None = None
    ) -> None:
        model = ServedModel(name="tiny", tokenizer=byte_tokenizer(), context_tokens=512)
        generation = self.generation = GenerationService([model], FakeTokenSource())
        console = ConsoleFeed(generation.telemetry, self._describe)
        self.servers = await ApiServers.start(
            generation, authenticator=authenticator, tls=tls, console=console
        )
        self.scheme = "http" if tls is None else "https"
        await self.servers.set_serving(True)
        self.ops = OpsServer(None, "text/plain")
        self.ops.http_port = generation.http_port
        self.ops_address = await self.ops.start("127.0.0.1:0")
        self.proxy.deploy("tandem")
        self.proxy.pages["/tandem"] = await self._describe()

    async def stop(self) -> None:
        await self.servers.stop(0)
        await self.ops.stop()

    @property
    def grpc(self) -> str:
        scheme = "grpc" if self.scheme == "http" else "grpcs"
        return f"{scheme}://{self.servers.grpc_address}"

    @property
    def http(self) -> str:
        return f"{self.scheme}://{self.servers.http_address}"

    @property
    def page(self) -> str:
        return f"{self.proxy.root}/tandem"

    async def _describe(self) -> dict[str, Any]:
        router = {
            "id": "r-0",
            "grpc": self.servers.grpc_address,
            "http": self.servers.http_address,
            "ops": self.ops_address,
            "console": f"{self.scheme}://{self.servers.http_address}/console",
        }
        facts = {"service": "tandem", "model": "tiny", "ray_dashboard": ""}
        return {**facts, "routers": [router], "workers": self.workers}


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with serving_proxy() as running:
        yield running


@pytest.fixture
async def service(proxy: Proxy) -> AsyncIterator[SmallService]:
    running = SmallService(proxy)
    await running.start()
    yield running
    await running.stop()


async def run(*args: str, stdin: str = "") -> str:
    """Returns what a command prints on stdout; raises what it raises."""
    done = await asyncio.to_thread(
        CliRunner().invoke, app, args, input=stdin, catch_exceptions=False
    )
    assert done.exit_code == 0, done.stderr
    return done.stdout


def addresses(service: SmallService) -> dict[str, str]:
    return {
        "page": service.page,
        "page with a slash": f"{service.page}/",
        "Serve": service.proxy.root,
        "API": service.http,
        "OpenAI's base URL": f"{service.http}/v1",
        "console": f"{service.http}/console",
        "ops port": f"http://{service.ops_address}",
    }


async def test_every_address_leads_to_every_other(service: SmallService) -> None:
    for name, url in (addresses(service) | {"gRPC": service.grpc}).items():
        access = ServiceAccess(url=url)
        assert await asyncio.to_thread(access.grpc_addresses) == service.grpc, name
        assert await asyncio.to_thread(access.api_url) == service.http, name
        page, status = await asyncio.to_thread(access.status)
        assert page == (service.page if url.startswith(service.proxy.root) else ""), name
        assert status["routers"][0]["http"] == service.servers.http_address, name


async def test_grpc_is_told_from_http_by_its_answer(service: SmallService) -> None:
    """A URL of the gRPC port with the wrong scheme leads to the same port."""
    wrong = service.grpc.replace("grpc:", "http:")
    assert await asyncio.to_thread(ServiceAccess(url=wrong).grpc_addresses) == service.grpc
    for name in (service.grpc, "h:1,h:2", "grpcs://[::1]:1"):
        assert ServiceAccess(url=name).grpc_addresses() == name


async def test_commands_take_any_address(
    service: SmallService, monkeypatch: pytest.MonkeyPatch
) -> None:
    for url in (service.grpc, *addresses(service).values()):
        assert await run("generate", "hi", "--url", url, "--max-tokens", "2")
        assert await run("chat", "--url", url, "--max-tokens", "2", stdin="hi\n")
    assert await run("generate", "hi", "--url", service.servers.grpc_address)
    for url in (service.grpc, *addresses(service).values()):
        assert (await run("status", "--url", url)).startswith("tandem: tiny\n")
        pages = json.loads(await run("dashboard", "--url", url, "--json"))
        assert pages["consoles"] == [f"{service.http}/console"]
        measured = await run("bench", "--url", url, *BENCH)
        assert (service.grpc if url == service.grpc else service.http) in measured
    monkeypatch.setenv("TANDEM_URL", service.page)
    assert await run("generate", "hi")
    assert (await run("status")).startswith("tandem: tiny\n")


async def test_batch_takes_any_address_of_the_api(
    service: SmallService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    (tmp_path / "in").write_text(json.dumps(line | {"body": {"prompt": "hi", "max_tokens": 1}}))
    for number, url in enumerate(addresses(service).values()):
        out = tmp_path / str(number)
        await run("batch", str(tmp_path / "in"), str(out), "--url", url)
        assert json.loads(out.read_text())["response"]["status_code"] == 200
    monkeypatch.setenv("TANDEM_URL", service.page)
    await run("batch", str(tmp_path / "in"), str(tmp_path / "last"))
    assert json.loads((tmp_path / "last").read_text())["response"]["status_code"] == 200


async def test_epochs_are_exact_and_the_same_from_both_pages(service: SmallService) -> None:
    epoch = 1_795_894_800_123_456_789  # which JavaScript would round
    service.workers.append({"id": "w", "epoch": epoch})
    for url in (service.http, service.page):
        _, found = await asyncio.to_thread(ServiceAccess(url=url).status)
        assert [each["epoch"] for each in found["workers"]] == [epoch], url


async def test_drain_by_the_api_finds_the_identity_that_the_user_keeps(
    service: SmallService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path))
    service.workers.append({"id": "w", "address": "127.0.0.1:1", "epoch": 1})
    command = ("drain", "all", "--url", service.http, "--timeout", "0")
    with pytest.raises(NotFound, match="has 0 identities of services named tandem"):
        await run(*command)
    with kept_identity(IDENTITY, f"{service.page}.2"):  # of a later deployment
        with pytest.raises(Unavailable, match="not every worker is drained"):
            await run(*command)
        with (
            kept_identity(IDENTITY, "http://127.0.0.1:1/tandem"),
            pytest.raises(NotFound, match="has 2 identities of"),
        ):
            await run(*command)


@pytest.mark.parametrize(
    ("method", "needed"),
    [
        (ServiceAccess.grpc_addresses, "the gRPC API, such as grpc://127.0.0.1:50051"),
        (ServiceAccess.api_url, "the HTTP API, such as http://127.0.0.1:8080"),
        (ServiceAccess.status, "the status page or the HTTP API, such as http://127.0.0.1:8080"),
    ],
)
async def test_an_address_that_tells_no_other_is_refused_with_the_remedy(
    service: SmallService, method: Callable[[ServiceAccess], object], needed: str
) -> None:
    ops = f"http://{service.ops_address}"
    service.ops.http_port = 0
    service.generation.http_port = 0
    for url, kind in ((ops, "ops port"), (service.grpc, "gRPC API")):
        if method is ServiceAccess.grpc_addresses and url == service.grpc:
            continue
        with pytest.raises(InvalidArgument) as caught:
            await asyncio.to_thread(method, ServiceAccess(url=url))
        expected = f"--url: {url} is the address of the {kind}; give the address of {needed}"
        assert str(caught.value).startswith(expected)


@pytest.mark.parametrize("url", ["", "x", "ftp://h:1", "http://", "http://[::1", "http://h:99999"])
def test_a_url_of_a_wrong_form_is_refused(url: str) -> None:
    for method in (ServiceAccess.grpc_addresses, ServiceAccess.api_url, ServiceAccess.status):
        with pytest.raises(InvalidArgument, match="--url: must be grpc://HOST:PORT"):
            method(ServiceAccess(url=url))


async def test_the_key_is_demanded_and_sent(proxy: Proxy) -> None:
    service = SmallService(proxy)
    await service.start(Authenticator((api_key(KEY),)))
    try:
        for method in (ServiceAccess.grpc_addresses, ServiceAccess.status):
            with pytest.raises(Unauthenticated, match="needs an API key: TANDEM_API_KEY or"):
                await asyncio.to_thread(method, ServiceAccess(url=service.http))
            assert await asyncio.to_thread(method, ServiceAccess(url=service.http, api_key=KEY))
    finally:
        await service.stop()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "grpc://127.0.0.1:1"])
@pytest.mark.parametrize("wrong", ["secret\n", "secret\x00", "secr\u00e9t"])
async def test_a_key_that_no_header_can_hold_is_refused_and_not_quoted(
    url: str, wrong: str
) -> None:
    for method in (ServiceAccess.api_url, ServiceAccess.status):
        with pytest.raises(InvalidArgument, match=r"^api_key: must be printable ASCII$"):
            await asyncio.to_thread(method, ServiceAccess(url=url, api_key=wrong))
    with pytest.raises(InvalidArgument, match=r"^api_key: must be printable ASCII$"):
        async with service_sender(url, wrong, ClientTls()):
            pass
    address = ServerAddress(url=url, api_key=wrong)
    with pytest.raises(InvalidArgument, match=r"^api_key: must be printable ASCII$"):
        async with open_target(address, ignore_eos=True):
            pass


async def test_tls_is_checked_and_goes_on_over_grpc(proxy: Proxy, tmp_path: Path) -> None:
    ca = make_certificate("ca")
    files = TlsConfig(certificate=str(tmp_path / "cert"), key=str(tmp_path / "key"))
    make_certificate("server", ca).write(Path(files.certificate), Path(files.key))
    trusted = ClientTls(ca=ca.write(tmp_path / "ca"))
    service = SmallService(proxy)
    await service.start(tls=ServerTls(files.load()))
    try:
        for url in (service.http, service.page):
            access = ServiceAccess(url=url, tls=trusted)
            assert await asyncio.to_thread(access.grpc_addresses) == service.grpc
        async with access.connect(AsyncClient) as client:
            assert await client.health()
        with pytest.raises(Unavailable, match=r"certificate verify failed.*--tls-ca$"):
            await asyncio.to_thread(ServiceAccess(url=service.http).status)
        wrong = ClientTls(ca=tmp_path / "none")
        with pytest.raises(InvalidArgument, match="none: No such file"):
            await asyncio.to_thread(ServiceAccess(url=service.http, tls=wrong).status)
    finally:
        await service.stop()


async def test_load_and_batches_reach_a_service_that_demands_certificates(
    proxy: Proxy, tmp_path: Path
) -> None:
    ca, (certificate, key) = make_certificate("ca"), (tmp_path / "cert", tmp_path / "key")
    make_certificate("both sides", ca).write(certificate, key)
    own = ("--tls-ca", str(ca.write(tmp_path / "ca")), "--tls-certificate", str(certificate))
    files = TlsConfig(certificate=str(certificate), key=str(key), client_ca=own[1])
    asked, answers = tmp_path / "asked", tmp_path / "answers"
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    asked.write_text(json.dumps(line | {"body": {"prompt": "hi", "max_tokens": 2}}))
    service = SmallService(proxy)
    await service.start(tls=ServerTls(files.load()))
    try:
        access = ("--url", service.http, *own, "--tls-key", str(key))
        await run("batch", str(asked), str(answers), *access)
        assert json.loads(answers.read_text())["response"]["status_code"] == 200
        for url in (service.grpc, service.http, service.page):
            await run("bench", "--url", url, *BENCH, *own, "--tls-key", str(key))
        for url in (service.grpc, service.http):
            with pytest.raises(TandemError):
                await run("bench", "--url", url, *BENCH, *own[:2])
            with pytest.raises(InvalidArgument, match="must be set together"):
                await run("bench", "--url", url, *BENCH, *own)
        with pytest.raises(InvalidArgument, match=r"cert or .*ca: "):
            await run("bench", "--url", service.http, *BENCH, *own, "--tls-key", own[1])
    finally:
        await service.stop()


def test_a_server_that_is_silent_or_away_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_url, "FIND_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(Unavailable, match="no service answers"):
            ServiceAccess(url=url).status()  # and returns, though the server never answers
        assert ServiceAccess(url=f"{url}/v1/").api_url() == url
    with pytest.raises(TandemError, match=f"no service answers at {url}/health: .*refused.*--url$"):
        ServiceAccess(url=url).grpc_addresses()


def test_an_error_of_grpc_without_a_connection_gets_the_address_and_a_remedy() -> None:
    access = ServiceAccess(url="grpc://127.0.0.1:1")
    text = f"^no service answers at {access.url}: failed to connect; start one with .*--url$"
    with pytest.raises(Unavailable, match=text), access.explained_errors():
        raise Unavailable("failed to connect")
    with pytest.raises(Unavailable, match=r"^no worker is ready$"), access.explained_errors():
        raise Unavailable("no worker is ready")


def test_a_key_is_not_sent_to_where_a_server_redirects(proxy: Proxy) -> None:
    proxy.deploy("a")
    proxy.redirects["/b"] = f"{proxy.root}/a"
    assert ServiceAccess(url=f"{proxy.root}/b", api_key="k").status()[1]["service"] == "a"
    assert proxy.keys == {"/b": "Bearer k", "/a": None}
