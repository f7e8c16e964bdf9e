"""Tests TLS at the real API servers, and the replacement of certificates under running streams."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import uvloop
from cryptography import x509

from tandem.proto.errors import InvalidArgument, Unavailable
from tandem.router.api.server.connection import ConnectionBounds
from tandem.router.api.server.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.auth.tls import ServerTls, TlsConfig, TlsMaterial
from tandem.router.auth.watch import FileWatch
from tandem.router.client.client import AsyncClient
from tandem.router.client.wire import ClientTls
from tandem.router.frontend.served_model import ServedModel
from tandem.tests.certificates import Certificate, make_certificate
from tandem.tests.router.api.test_authentication import HeldSource
from tandem.tests.router.api.test_connections import connected
from tandem.tests.waits import WAIT

BODY = {"model": "tiny", "prompt": "hi", "max_tokens": 4}


@dataclass(kw_only=True)
class SecureService:
    """Holds a running service and the files of its certificates."""

    folder: Path
    ca: Certificate
    servers: ApiServers
    watch: FileWatch[TlsMaterial]
    source: HeldSource = field(default_factory=lambda: HeldSource(answer=b"abcd"))

    @property
    def tls(self) -> ClientTls:
        return ClientTls(ca=self.folder / "ca.pem")

    def client(self, tls: ClientTls | None = None) -> AsyncClient:
        return AsyncClient(
            f"grpcs://{self.servers.grpc_address}", tls=tls or self.tls, max_retries=0
        )

    def http(self, certificate: str = "") -> httpx.AsyncClient:
        context = ssl.create_default_context(cafile=str(self.folder / "ca.pem"))
        if certificate:
            context.load_cert_chain(
                self.folder / f"{certificate}.pem", self.folder / f"{certificate}.key"
            )
        return httpx.AsyncClient(
            base_url=f"https://{self.servers.http_address}", verify=context, timeout=WAIT
        )

    async def serials(self) -> list[int]:
        """Returns the serial numbers of the certificates that new connections get."""
        found = []
        for address in (self.servers.grpc_address, self.servers.http_address):
            host, port = address.split(":")
            pem = await asyncio.to_thread(
                ssl.get_server_certificate, (host, int(port)), timeout=WAIT
            )
            found.append(x509.load_pem_x509_certificate(pem.encode()).serial_number)
        return found


def write(folder: Path, name: str, issuer: Certificate) -> Certificate:
    made = make_certificate(name, issuer)
    made.write(folder / f"{name}.pem", folder / f"{name}.key")
    return made


@pytest.fixture(params=[False])
async def secure(
    request: pytest.FixtureRequest, tmp_path: Path, model: ServedModel
) -> AsyncIterator[SecureService]:
    """Starts both servers with TLS; if the parameter is true, clients need a certificate."""
    ca = make_certificate("ca")
    ca.write(tmp_path / "ca.pem")
    write(tmp_path, "server", ca)
    client_ca = str(tmp_path / "ca.pem") if request.param else None
    files = TlsConfig(
        certificate=str(tmp_path / "server.pem"),
        key=str(tmp_path / "server.key"),
        client_ca=client_ca,
    )
    tls = ServerTls(files.load())
    source = HeldSource(answer=b"abcd")
    servers = await ApiServers.start(GenerationService([model], source), tls=tls)
    await servers.set_serving(True)
    watch = FileWatch(files.paths, files.load, tls.replace)
    yield SecureService(folder=tmp_path, ca=ca, servers=servers, watch=watch, source=source)
    source.released.set()
    await servers.stop(0)
    assert source.running == 0


async def test_both_servers_speak_tls_and_no_plaintext(secure: SecureService) -> None:
    secure.source.released.set()
    async with secure.client() as client, secure.http() as http:
        assert (await client.generate("hi", max_tokens=4)).text == "abcd"
        assert (await http.post("/v1/completions", json=BODY)).json()["choices"][0][
            "text"
        ] == "abcd"
    async with AsyncClient(secure.servers.grpc_address, max_retries=0) as client:
        with pytest.raises(Unavailable):
            await client.generate("hi", timeout=WAIT)
    async with httpx.AsyncClient(
        base_url=f"http://{secure.servers.http_address}", timeout=WAIT
    ) as http:
        with pytest.raises(httpx.TransportError):
            await http.get("/health")
    make_certificate("another").write(secure.folder / "other.pem")
    async with secure.client(ClientTls(ca=secure.folder / "other.pem")) as client:
        with pytest.raises(Unavailable):
            await client.generate("hi", timeout=WAIT)


async def test_a_certificate_is_replaced_under_sixteen_streams(secure: SecureService) -> None:
    async with secure.client() as client, secure.http() as http:

        async def over_http() -> str:
            answer = await http.post("/v1/completions", json=BODY)
            return str(answer.json()["choices"][0]["text"])

        async def over_grpc() -> str:
            return (await client.generate("hi", max_tokens=4)).text

        streams = [asyncio.create_task(over_http() if n % 2 else over_grpc()) for n in range(16)]
        await asyncio.wait_for(secure.source.wait_running(16), WAIT)
        before = await secure.serials()
        made = await asyncio.to_thread(write, secure.folder, "server", secure.ca)
        await secure.watch.check()
        after = await secure.serials()
        assert before[0] == before[1] != after[0]
        assert after == [made.certificate.serial_number] * 2
        assert secure.source.running == 16
        secure.source.released.set()
        assert await asyncio.gather(*streams) == ["abcd"] * 16
    async with secure.client() as client, secure.http() as http:  # new connections
        assert (await client.generate("hi", max_tokens=4)).text == "abcd"
        assert (await http.get("/health")).status_code == 200


async def test_half_a_change_is_ignored(secure: SecureService) -> None:
    """Between two writes, the new certificate has no key yet."""
    before = await secure.serials()
    new = make_certificate("server", secure.ca)
    await asyncio.to_thread(new.write, secure.folder / "server.pem")
    await secure.watch.check()
    assert await secure.serials() == before
    await asyncio.to_thread(new.write, secure.folder / "server.pem", secure.folder / "server.key")
    await secure.watch.check()
    assert await secure.serials() == [new.certificate.serial_number] * 2


@pytest.mark.parametrize("secure", [True], indirect=True)
async def test_with_a_client_ca_clients_need_a_certificate_of_it(
    secure: SecureService,
) -> None:
    secure.source.released.set()
    write(secure.folder, "client", secure.ca)
    write(secure.folder, "stranger", make_certificate("another"))
    for name in ("", "stranger"):
        own = (
            {"certificate": secure.folder / f"{name}.pem", "key": secure.folder / f"{name}.key"}
            if name
            else {}
        )
        async with secure.client(ClientTls(ca=secure.folder / "ca.pem", **own)) as client:
            with pytest.raises(Unavailable):
                await client.generate("hi", timeout=WAIT)
        async with secure.http(name) as http:
            with pytest.raises(httpx.TransportError):
                await http.get("/health")
    own = {"certificate": secure.folder / "client.pem", "key": secure.folder / "client.key"}
    async with (
        secure.client(ClientTls(ca=secure.folder / "ca.pem", **own)) as client,
        secure.http("client") as http,
    ):
        assert (await client.generate("hi", max_tokens=4)).text == "abcd"
        assert (await http.get("/health")).status_code == 200
    assert len(secure.source.requests) == 1


async def test_a_client_that_never_begins_its_handshake_delays_no_other(
    secure: SecureService,
) -> None:
    secure.source.released.set()
    with socket.create_connection(tuple(secure.servers.http_address.split(":"))):  # type: ignore[arg-type]
        async with secure.http() as http:
            assert (await http.get("/health")).status_code == 200


@asynccontextmanager
async def bounded_service(
    tmp_path: Path, model: ServedModel, bounds: ConnectionBounds
) -> AsyncIterator[SecureService]:
    ca = make_certificate("ca")
    ca.write(tmp_path / "ca.pem")
    write(tmp_path, "server", ca)
    files = TlsConfig(certificate=str(tmp_path / "server.pem"), key=str(tmp_path / "server.key"))
    tls, source = ServerTls(files.load()), HeldSource(answer=b"abcd")
    servers = await ApiServers.start(GenerationService([model], source), tls=tls, bounds=bounds)
    await servers.set_serving(True)
    watch = FileWatch(files.paths, files.load, tls.replace)
    try:
        async with asyncio.timeout(2 * WAIT):
            yield SecureService(folder=tmp_path, ca=ca, servers=servers, watch=watch, source=source)
    finally:
        source.released.set()
        await servers.stop(0)
    assert not bounds.per_address
    assert not bounds.num_connections


@pytest.mark.parametrize(
    "said", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["nothing", "half a greeting"]
)
async def test_a_connection_without_its_handshake_is_ended_as_one_without_its_head(
    tmp_path: Path, model: ServedModel, said: bytes
) -> None:
    bounds = ConnectionBounds(head_seconds=0.3)
    async with (
        bounded_service(tmp_path, model, bounds) as service,
        connected(service.servers.http_address) as (reader, writer),
    ):
        writer.write(said)
        with suppress(ConnectionError):
            await reader.read()  # to its end


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_handshakes_that_never_end_give_way_to_a_good_client(
    tmp_path: Path, model: ServedModel, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Also uses uvloop, the event loop of replicas."""
    bounds = ConnectionBounds(max_per_address=8)

    async def attack() -> None:
        async with bounded_service(tmp_path, model, bounds) as service, AsyncExitStack() as scope:
            service.source.released.set()
            streams = [
                await scope.enter_async_context(connected(service.servers.http_address))
                for _ in range(40)
            ]
            async with service.http() as http:
                assert (await http.post("/v1/completions", json=BODY)).status_code == 200
                assert bounds.per_address.total() == bounds.num_connections <= 8
            for reader, _ in streams[:30]:
                with suppress(ConnectionError):
                    assert await reader.read() == b""

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(attack())


async def test_a_server_that_stops_leaves_no_handshake(tmp_path: Path, model: ServedModel) -> None:
    bounds = ConnectionBounds()
    async with (
        bounded_service(tmp_path, model, bounds) as service,
        connected(service.servers.http_address) as (reader, _),
    ):
        while not bounds.num_connections:
            await asyncio.sleep(0.01)
        await service.servers.stop(0)
        with suppress(ConnectionError):
            assert await reader.read() == b""


def test_wrong_files_are_refused_by_name(tmp_path: Path) -> None:
    one, two = (write(tmp_path, name, make_certificate("ca")) for name in ("one", "two"))
    assert one.key is not two.key
    with pytest.raises(InvalidArgument, match="do not match"):
        TlsConfig(certificate=str(tmp_path / "one.pem"), key=str(tmp_path / "two.key")).load()
    with pytest.raises(InvalidArgument, match=r"absent\.pem: No such file"):
        TlsConfig(certificate=str(tmp_path / "absent.pem"), key=str(tmp_path / "two.key")).load()
    (tmp_path / "bad.pem").write_text("no certificate")
    with pytest.raises(InvalidArgument, match="client_ca"):
        TlsConfig(
            certificate=str(tmp_path / "one.pem"),
            key=str(tmp_path / "one.key"),
            client_ca=str(tmp_path / "bad.pem"),
        ).load()


@pytest.mark.parametrize("address", ["https://h:1", "grpc://h:1"])
def test_an_address_that_does_not_go_with_tls_is_refused(address: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="grpcs://HOST:PORT"):
        AsyncClient(address, tls=ClientTls(ca=make_certificate("ca").write(tmp_path / "ca.pem")))
