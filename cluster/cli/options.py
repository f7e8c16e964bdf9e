"""Makes the options of `tandem generate`, `chat` and `eval`, those of requests from the table of
parameters.
"""

import inspect
import os
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, cast, get_type_hints

import typer

from ...proto.errors import InvalidArgument
from ...proto.parameters import PARAMETERS, RequestParameter
from ...router.client.types import Options
from ...router.client.wire import API_KEY_VARIABLE, ClientTls
from ..text_files import read_text

_Client = TypeVar("_Client")

DEFAULT_TARGET: Final = "127.0.0.1:50051"

Target = Annotated[
    str, typer.Option(help="HOST:PORT of the service's gRPC server; with TLS grpcs://HOST:PORT.")
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        help="A file that holds the API key; otherwise TANDEM_API_KEY.", show_default=False
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(help="The CA of the service's certificate, in PEM.", show_default=False),
]
TlsCertificate = Annotated[
    Path | None,
    typer.Option(help="Our own certificate, for a service that demands one.", show_default=False),
]
TlsKey = Annotated[
    Path | None, typer.Option(help="The key of our own certificate.", show_default=False)
]
Model = Annotated[
    str | None, typer.Option(help="One of the served names; may be absent if only one is served.")
]
Timeout = Annotated[float | None, typer.Option(help="Seconds until the request is given up.")]
ShowTimeline = Annotated[
    bool, typer.Option("--timeline", help="Print on stderr where the time went.")
]

_TYPES: Final = {
    **{"bool": bool, "float": float | None, "string": str | None, "json": str | None},
    **dict.fromkeys(("int32", "uint32", "uint64"), int | None),
    **{"strings": list[str] | None, "token_ids": list[int] | None, "logit_bias": list[str] | None},
}
_NOTES: Final = {
    **dict.fromkeys(("strings", "token_ids"), " May be given several times."),
    "logit_bias": " ID=BIAS; may be given several times.",
}
_READ_FROM_FILES: Final = ("json_schema", "grammar")  # @FILE


def request_options(
    *names: str, **defaults: object
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds the options of request parameters, by their client names, to a command; without names
    all.

    The command does not receive them: `given_options` takes them from its typer.Context. `defaults`
    are those of single options, which are absent otherwise.
    """
    rows = [row for row in PARAMETERS if not names or row.client_name in names]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command).parameters
        hints = get_type_hints(command, include_extras=True)
        taken = [parameter.replace(annotation=hints[name]) for name, parameter in own.items()]
        added = [_parameter(row, defaults) for row in rows if row.client_name not in own]

        @wraps(command)
        def run(**given: object) -> None:
            command(**{name: given[name] for name in own})

        run.__signature__ = inspect.Signature([*taken, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {
            parameter.name: parameter.annotation for parameter in (*taken, *added)
        }
        return run

    return decorate


def _parameter(row: RequestParameter, defaults: Mapping[str, object]) -> inspect.Parameter:
    name = row.client_name
    note = " @FILE reads it from a file." if name in _READ_FROM_FILES else _NOTES.get(row.kind, "")
    option = typer.Option(row.option, help=row.help + note)
    default = defaults.get(name, False if row.kind == "bool" else None)
    kind: Any = _TYPES[row.kind]
    annotation = Annotated[kind, option]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def read_api_key(file: Path | None) -> str:
    """Returns the API key: of the file, or else of the environment. Other users see a command's
    arguments, so no option takes the key itself. Raises InvalidArgument.
    """
    if file is None:
        return os.environ.get(API_KEY_VARIABLE, "")
    return read_text(file, "api-key-file").strip()


def connect(
    client: Callable[..., _Client],
    target: str,
    api_key_file: Path | None,
    tls_ca: Path | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
) -> _Client:
    """Returns a Client or an AsyncClient with what these options say. Raises InvalidArgument as
    `read_api_key`.
    """
    tls = ClientTls(ca=tls_ca, certificate=tls_certificate, key=tls_key)
    return client(target, api_key=read_api_key(api_key_file), tls=tls)


def given_options(params: Mapping[str, Any]) -> Options:
    """Returns a command's parameters as options of a client; those that are not given are left out.

    Raises InvalidArgument for a logit bias of a wrong form and a file that cannot be read."""
    names = {row.client_name for row in PARAMETERS}
    options = {name: value for name, value in params.items() if name in names and _is_given(value)}
    if "logit_bias" in options:
        options["logit_bias"] = dict(map(_bias, options["logit_bias"]))
    for name in _READ_FROM_FILES:
        if name in options and options[name].startswith("@"):
            options[name] = read_text(Path(options[name][1:]), name)
    return cast(Options, options)


def _is_given(value: object) -> bool:
    return not (value is None or value is False or value == [] or value == ())


def _bias(given: str) -> tuple[int, float]:
    token_id, _, bias = given.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise InvalidArgument(f"{given!r} is not ID=BIAS, such as 17=-100", "logit_bias") from None
