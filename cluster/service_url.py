"""Finds the addresses of a running service from any one of them: gRPC, HTTP API, status page.

The status page, and the data of the console beside the HTTP API, name the addresses of all routers.
The gRPC API and the ops port name the port of the HTTP API on their host. Knows nothing of commands
and prints nothing.
"""

import http.client
import json
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

import grpc

from ..proto import inference_pb2
from ..proto.addresses import host_of, in_brackets
from ..proto.errors import InvalidArgument, NotFound, PermissionDenied, Unauthenticated, Unavailable
from ..router.client.routers import RouterStubs
from ..router.client.wire import ClientTls, authorization, credentials, error_of, open_channel
from .serve.status import in_order, service_of

FIND_SECONDS: Final = 10.0
"""For all questions that find out which address a URL is."""

GRPC_URL: Final = "grpc://127.0.0.1:50051"
STATUS_URL: Final = "http://127.0.0.1:8000/tandem"

OPTION: Final = "--url"
_FORMS: Final = "grpc://HOST:PORT, grpcs://HOST:PORT, http://HOST:PORT or https://HOST:PORT"
_MAX_BYTES: Final = 16 * 1024 * 1024
_HEALTH_STATUSES: Final = (200, 503)
_OK: Final = 200
_NOT_FOUND: Final = 404
_NOT_HTTP: Final = "the answer is not HTTP"
_NO_CONNECTION: Final = ("failed to connect", "DNS resolution failed")  # texts of gRPC begin so
_START: Final = f"; start one with `tandem serve MODEL`, or give its address by {OPTION}"

_T = TypeVar("_T")
_Client = TypeVar("_Client")

Kind = Literal["gRPC API", "HTTP API", "status page", "ops port"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundService:
    """Describes the server at a URL; `service` is the status of the service if it was told."""

    kind: Kind
    url: str  # without /v1 and /console; of the status page that is served now
    service: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAccess:
    """Names a running service by any of its addresses, with the key and the certificates for it.

    All methods raise InvalidArgument for a URL of a wrong form, and for an address that neither
    serves the purpose nor tells the one that does. They raise Unauthenticated without a valid key,
    and Unavailable if nothing of a service answers within FIND_SECONDS.
    """

    url: str
    api_key: str = field(default="", repr=False)
    tls: ClientTls = field(default_factory=ClientTls)

    @contextmanager
    def explained_errors(self) -> Iterator[None]:
        """Adds the address and a remedy to an error of gRPC that says only that no one answers."""
        try:
            yield
        except Unavailable as error:
            if not error.message.startswith(_NO_CONNECTION):
                raise
            text = f"no service answers at {self.url}: {error.message}{_START}"
            raise Unavailable(text, error.retry_after) from None

    def connect(self, client: Callable[..., _Client]) -> _Client:
        """Returns a Client or an AsyncClient of the service's routers."""
        return client(self.grpc_addresses(), api_key=self.api_key, tls=self.tls)

    def grpc_addresses(self) -> str:
        """Returns the addresses of the routers' gRPC servers, as clients take them."""
        if _is_grpc(self.url):
            return self.url
        found = self._find()
        if found.kind == "gRPC API":
            return found.url
        if found.service is None or not found.service["routers"]:
            raise self._refused(found.kind, "the gRPC API, such as grpc://{host}:50051")
        routers = found.service["routers"]
        scheme = "grpcs" if routers[0]["console"].startswith("https:") else "grpc"
        return ",".join(f"{scheme}://{router['grpc']}" for router in routers)

    def api_url(self) -> str:
        """Returns the URL of an HTTP API, without /v1.

        A server that is not of Tandem, or does not answer now, is assumed to be such an API.
        """
        needed = "the HTTP API, such as http://{host}:8080"
        try:
            found = self._find()
        except (Unauthenticated, Unavailable):
            if _is_grpc(self.url):
                raise
            return _without_page(self.url)
        if found.kind == "HTTP API":
            return found.url
        if found.service is None or not found.service["routers"]:
            raise self._refused(found.kind, needed)
        return _without_page(found.service["routers"][0]["console"])

    def read(self, path: str) -> Any:
        """Returns the JSON object at a path of the HTTP API.

        Raises also PermissionDenied, NotFound and Unavailable, as the API answers.
        """
        url = f"{self.api_url()}{path}"
        status, body = _within(FIND_SECONDS, lambda: self._finder(url)._get(url))
        if status == Unauthenticated.http_status:
            raise _needs_key("HTTP API")
        if status != _OK:
            kinds = {
                each.http_status: each for each in (InvalidArgument, NotFound, PermissionDenied)
            }
            error = body.get("error") if isinstance(body, dict) else None
            text = error.get("message") if isinstance(error, dict) else None
            raise kinds.get(status, Unavailable)(text or f"{url} answers {status}")
        if not isinstance(body, dict):
            raise Unavailable(f"{url} does not answer with a JSON object")
        return body

    def status(self) -> tuple[str, dict[str, Any]]:
        """Returns the URL of the status page, and the status of the service as plain data.

        The page of a service that was replaced is the page of its successor. The URL is empty if
        the HTTP API has told the status.
        """
        needed = "the status page or the HTTP API, such as http://{host}:8080"
        found = self._find()
        if found.service is None:
            raise self._refused(found.kind, needed)
        return found.url if found.kind == "status page" else "", found.service

    def _find(self) -> FoundService:
        if _is_grpc(self.url):
            return _within(FIND_SECONDS, self._find_beside_grpc)
        _check_form(self.url)
        found = _within(FIND_SECONDS, lambda: self._finder(self.url).find(self.url))
        if found.kind == "gRPC API":  # the URL has the wrong scheme
            return replace(self, url=found.url)._find()
        return found

    def _find_beside_grpc(self) -> FoundService:
        """Returns the service as the HTTP API on the host of this gRPC API tells it."""
        url = self.url.partition(",")[0]
        channel = open_channel(grpc, url, self.tls, grpc.Compression.NoCompression)
        with channel:
            try:
                models = RouterStubs(channel).inference.ListModels(
                    inference_pb2.ListModelsRequest(),
                    metadata=credentials(self.api_key),
                    timeout=FIND_SECONDS,
                )
            except grpc.RpcError as error:
                raise error_of(error) from None
        if not models.http_port:
            return FoundService(kind="gRPC API", url=url)
        uses_tls = url.startswith("grpcs:") or self.tls.is_given
        host = in_brackets(host_of(url.rpartition("://")[2]))
        beside = f"{'https' if uses_tls else 'http'}://{host}:{models.http_port}"
        return self._finder(beside).find(beside)

    def _finder(self, url: str) -> "_Finder":
        context = self.tls.context() if url.startswith("https:") or self.tls.is_given else None
        return _Finder(self.api_key, context)

    def _refused(self, kind: Kind, needed: str) -> InvalidArgument:
        _, scheme, rest = self.url.rpartition("://")
        if not scheme:
            return InvalidArgument(f"must be {_FORMS}, got {self.url!r}", OPTION)
        host = in_brackets(host_of(rest)) or "HOST"
        where = f"{self.url} is the address of the {kind}"
        return InvalidArgument(f"{where}; give the address of {needed.format(host=host)}", OPTION)


class _SpeaksHttp2(Exception):
    """Reports a server that answers in HTTP/2, as a gRPC server does."""


class _Finder:
    """Asks one URL, and the pages beside it, for the service that they belong to."""

    def __init__(self, api_key: str, context: ssl.SSLContext | None) -> None:
        self._uses_tls = context is not None
        self._headers = authorization(api_key)
        # No proxy: it might not reach the addresses of the service's nodes.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if context is not None:
            handlers.append(urllib.request.HTTPSHandler(context=context))
        self._opener = urllib.request.build_opener(*handlers)

    def find(self, given: str) -> FoundService:
        url = _without_page(given)
        try:
            found = self._find_page(url) if urlsplit(url).path else None
            return found or self._find_port(given, url)
        except _SpeaksHttp2:
            return FoundService(kind="gRPC API", url=f"grpc://{urlsplit(url).netloc}")

    def _find_page(self, url: str) -> FoundService | None:
        """Returns the status page at this URL or, of a service that was replaced, beside it."""
        status, body = self._get(url)
        if _is_status(body):
            return FoundService(kind="status page", url=url, service=body)
        if status == Unauthenticated.http_status:
            raise _needs_key("status page")
        if status != _NOT_FOUND:
            return None
        root, _, application = url.rpartition("/")
        return self._find_application(root, service_of(application))

    def _find_application(self, root: str, service: str | None) -> FoundService | None:
        """Returns the status page of a service's oldest deployment.

        The oldest one serves while a younger one starts. None stands for the only service.
        """
        _, routes = self._get(f"{root}/-/routes")
        if not isinstance(routes, dict | list):
            return None
        names = [str(route).removeprefix("/") for route in routes]
        services = {service_of(name) for name in names if name}
        if service is None and len(services) == 1:
            service = next(iter(services))
        for name in in_order(service or "", names):
            url = f"{root}/{name}"
            status, body = self._get(url)
            if status == Unauthenticated.http_status:
                raise _needs_key("status page")
            if _is_status(body):
                return FoundService(kind="status page", url=url, service=body)
        return None

    def _find_port(self, given: str, url: str) -> FoundService:
        """Returns the server on this port: an API server, the ops port or Serve's HTTP proxy."""
        status, body = self._get(f"{url}/health")
        if status in _HEALTH_STATUSES and isinstance(body, dict):
            return FoundService(kind="HTTP API", url=url, service=self._ask_console(url))
        status, body = self._get(f"{url}/live")
        if status in _HEALTH_STATUSES and isinstance(body, dict) and "status" in body:
            return self._find_beside_ops(given, url, body.get("http_port"))
        if not urlsplit(url).path and (found := self._find_application(url, None)):
            return found
        raise Unavailable(f"no service answers at {given}: Not Found{_START}")

    def _find_beside_ops(self, given: str, url: str, http_port: object) -> FoundService:
        """Returns the service as the HTTP API on the host of this ops port tells it."""
        if not http_port:
            return FoundService(kind="ops port", url=url)
        scheme = "https" if self._uses_tls else "http"
        host = in_brackets(urlsplit(url).hostname or "")
        return self._find_port(given, f"{scheme}://{host}:{http_port}")

    def _ask_console(self, url: str) -> dict[str, Any] | None:
        """Returns the status of the service as the console's data has it, if it has one."""
        status, body = self._get(f"{url}/console/data")
        if status == Unauthenticated.http_status:
            raise _needs_key("HTTP API")
        service = body.get("service") if isinstance(body, dict) else None
        return _with_number_epochs(service) if service and _is_status(service) else None

    def _get(self, url: str) -> tuple[int, Any]:
        """Returns the HTTP status and the JSON at a URL, None for another body.

        Raises Unavailable without an answer, and _SpeaksHttp2 for an answer of a gRPC server.
        """
        request = urllib.request.Request(url)
        for name, value in self._headers.items():
            request.add_unredirected_header(name, value)  # other hosts must not get the key
        try:
            with self._opener.open(request, timeout=FIND_SECONDS) as answer:
                status, data = answer.status, answer.read(_MAX_BYTES)
        except urllib.error.HTTPError as error:
            status, data = error.code, error.read(_MAX_BYTES)
        except http.client.BadStatusLine as error:
            if str(error.args[0]).startswith("\0"):  # the first byte of the first frame in HTTP/2
                raise _SpeaksHttp2 from None
            raise Unavailable(f"no service answers at {url}: {_NOT_HTTP}") from None
        except http.client.HTTPException:
            raise Unavailable(f"no service answers at {url}: {_NOT_HTTP}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise Unavailable(f"no service answers at {url}: {reason}{_remedy(reason)}") from None
        with suppress(ValueError, RecursionError):
            return status, json.loads(data)
        return status, None


def _check_form(url: str) -> None:
    with suppress(ValueError):  # of brackets and ports
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return
    raise InvalidArgument(f"must be {_FORMS}, got {url!r}", OPTION)


def _is_grpc(url: str) -> bool:
    """Returns True for an address that only a gRPC client takes: HOST:PORT without a scheme is."""
    scheme, separator, _ = url.partition("://")
    return scheme in ("grpc", "grpcs") or (not separator and ":" in url)


def _is_status(body: object) -> bool:
    return isinstance(body, dict) and "workers" in body


def _with_number_epochs(service: dict[str, Any]) -> dict[str, Any]:
    """Returns the console's description of a service with epochs as the status page has them."""
    workers = [{**each, "epoch": int(each["epoch"])} for each in service["workers"]]
    return service | {"workers": workers}


def _without_page(url: str) -> str:
    """Returns the URL without a slash at its end, and without the path of a page of the API."""
    return url.rstrip("/").removesuffix("/v1").removesuffix("/console").rstrip("/")


def _needs_key(where: str) -> Unauthenticated:
    return Unauthenticated(f"the {where} needs an API key: TANDEM_API_KEY or --api-key-file")


def _remedy(reason: object) -> str:
    """Returns the end of an error about a service that does not answer for this reason."""
    if isinstance(reason, ssl.SSLCertVerificationError):
        return "; give the CA of its certificate by --tls-ca"
    return "" if isinstance(reason, ssl.SSLError) else _START


def _within(seconds: float, work: Callable[[], _T]) -> _T:
    """Returns the result of `work`, which runs in a thread. Raises Unavailable after `seconds`."""
    ended: Future[_T] = Future()

    def run() -> None:
        try:
            ended.set_result(work())
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, name="tandem-find", daemon=True).start()
    try:
        return ended.result(seconds)
    except TimeoutError:
        raise Unavailable(f"no service answers within {seconds:g} s") from None
