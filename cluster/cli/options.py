"""Makes options of commands: for requests, for the service to call, and for its settings.

Requests have the options of proto/parameters.py, settings the options of cluster/settings.py.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Final, cast, get_type_hints

import typer

from ...proto.errors import InvalidArgument
from ...proto.parameters import PARAMETERS, RequestParameter
from ...router.client.types import Options
from ...router.client.wire import ClientTls, environment_api_key
from ..config import TandemConfig
from ..service_url import ServiceAccess
from ..settings import ALWAYS_ON, SETTINGS, Setting
from ..text_files import read_text

URL_VARIABLE: Final = "TANDEM_URL"

ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        help="A file that holds the API key; otherwise TANDEM_API_KEY.", show_default=False
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(help="A PEM file with the CA of the service's certificate.", show_default=False),
]
TlsCertificate = Annotated[
    Path | None,
    typer.Option(
        help="A PEM file with your certificate, for a service that demands one.",
        show_default=False,
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option(help="A PEM file with the key of --tls-certificate.", show_default=False),
]
_Url = Annotated[
    str,
    typer.Option(
        envvar=URL_VARIABLE,
        help="Any address of the service: grpc(s)://HOST:PORT, http(s)://HOST:PORT of the API, "
        "or the status page.",
    ),
]
Model = Annotated[
    str | None, typer.Option(help="A model that the service serves; not needed if it serves one.")
]
Timeout = Annotated[
    float | None, typer.Option(help="The maximum time of the request in seconds; then it fails.")
]
LengthScale = Annotated[
    str, typer.Option(help="With --trace: the scale of its lengths and blocks, such as 1/8.")
]
Speed = Annotated[float, typer.Option(help="With --trace: 0.05 makes it run 20 times as slowly.")]
SpreadArrivals = Annotated[
    bool,
    typer.Option(
        "--spread-arrivals",
        help="With --trace: spread requests with equal times until the next time; Mooncake rounds "
        "times to 3 s.",
    ),
]
ShowTimeline = Annotated[
    bool, typer.Option("--timeline", help="Print the time of each part of a request on stderr.")
]

_TYPES: Final = {
    "bool": bool,
    "float": float | None,
    "string": str | None,
    "json": str | None,
    "int32": int | None,
    "uint32": int | None,
    "uint64": int | None,
    "strings": list[str] | None,
    "token_ids": list[int] | None,
    "logit_bias": list[str] | None,
}
_NOTES: Final = {
    "strings": " May be given several times.",
    "token_ids": " May be given several times.",
    "logit_bias": " ID=BIAS; may be given several times.",
}
_SHORT: Final = {  # vLLM's short flags of settings
    "routers": ("-asc",),
    "tp": ("-tp",),
    "quantization": ("-q",),
}
_READ_FROM_FILES: Final = ("json_schema", "grammar")  # @FILE


def request_options(
    *names: str, **defaults: object
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds options for request parameters to a command: for these client names, or for all.

    The command does not receive them: `given_options` reads them in its typer.Context. An option
    without a value in `defaults` is absent by default.
    """
    rows = [row for row in PARAMETERS if not names or row.client_name in names]
    return lambda command: _extend(command, [_parameter(row, defaults) for row in rows])


def service_options(url: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds the options that name a running service; `url` is the default of --url.

    The parameter `service` of the command gets a ServiceAccess.
    """
    options = {
        "url": (_Url, url),
        "api_key_file": (ApiKeyFile, None),
        "tls_ca": (TlsCa, None),
        "tls_certificate": (TlsCertificate, None),
        "tls_key": (TlsKey, None),
    }
    added = [_keyword(name, annotation, default) for name, (annotation, default) in options.items()]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = _parameters(command)
        del own["service"]

        def run(**given: Any) -> None:
            tls = ClientTls(
                ca=given["tls_ca"], certificate=given["tls_certificate"], key=given["tls_key"]
            )
            service = ServiceAccess(
                url=given["url"],
                api_key=read_api_key(given["api_key_file"]),
                tls=tls,
            )
            with service.explained_errors():
                command(service=service, **{name: given[name] for name in own})

        return _with_parameters(command, run, [*own.values(), *added])

    return decorate


def setting_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of all SETTINGS to a command, with vLLM's names as aliases.

    The command does not receive them: `collect_overrides` reads them in its typer.Context.
    """
    added = [_setting_parameter(setting) for setting in SETTINGS]
    for name, reason in ALWAYS_ON.items():
        option = typer.Option(_flag(name), hidden=True, help=f"No effect: {reason}.")
        added.append(_keyword(name, Annotated[bool, option], False))
    return _extend(command, added)


def _setting_parameter(setting: Setting) -> inspect.Parameter:
    flags = [_flag(name) for name in dict.fromkeys((setting.name, *setting.vllm))]
    if setting.kind is bool and setting.has_negation:
        flags = [f"{flag}/--no-{flag[2:]}" for flag in flags]
    flags += _SHORT.get(setting.name, ())
    kind: Any = list[str] if setting.kind is list else setting.kind
    option = typer.Option(*flags, help=setting.help + _default_text(setting), show_default=False)
    return _keyword(setting.name, Annotated[kind | None, option], None)


def _default_text(setting: Setting) -> str:
    """Returns the default of a setting as the end of its help.

    The text is empty for a flag that is off and for a default that is no single value, which
    `setting.help` describes.
    """
    section, *names = setting.keys[0].split(".")
    value: Any = TandemConfig.model_fields[section].default
    for name in names:
        value = getattr(value, name)
    if isinstance(value, bool):
        return " [default: on]" if value else ""
    if isinstance(value, float):
        value = f"{value:g}"
    return f" [default: {value}]" if isinstance(value, str | int) else ""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _keyword(name: str, annotation: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _extend(
    command: Callable[..., None], added: Sequence[inspect.Parameter]
) -> Callable[..., None]:
    """Returns a command with further options, which the function itself does not receive."""
    own = _parameters(command)

    def run(**given: object) -> None:
        command(**{name: given[name] for name in own})

    return _with_parameters(
        command, run, [*own.values(), *(each for each in added if each.name not in own)]
    )


def _parameters(command: Callable[..., None]) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a command, with their annotations evaluated, by name."""
    hints = get_type_hints(command, include_extras=True)
    return {
        name: parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
    }


def _with_parameters(
    command: Callable[..., None],
    run: Callable[..., None],
    parameters: Sequence[inspect.Parameter],
) -> Callable[..., None]:
    """Returns `run` under the name and the help of `command`, with these parameters."""
    wrapped = wraps(command)(run)
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
    return wrapped


def _parameter(row: RequestParameter, defaults: Mapping[str, object]) -> inspect.Parameter:
    name = row.client_name
    note = " @FILE reads it from a file." if name in _READ_FROM_FILES else _NOTES.get(row.kind, "")
    text = row.help
    if name in defaults:  # the command never leaves the parameter out
        text = text.partition(" Unset:")[0]
    option = typer.Option(row.option, help=text + note)
    default = defaults.get(name, False if row.kind == "bool" else None)
    kind: Any = _TYPES[row.kind]
    return _keyword(name, Annotated[kind, option], default)


def read_api_key(file: Path | None) -> str:
    """Returns the API key from the file, or without one from the environment.

    Other users see a command's arguments, so no option has the key itself. Raises InvalidArgument.
    """
    if file is None:
        return environment_api_key()
    return read_text(file, "--api-key-file").strip()


def check_choice(option: str, value: str, choices: Iterable[str]) -> None:
    """Raises InvalidArgument, which names the option, for a value that is not a choice."""
    if value not in choices:
        raise InvalidArgument(f"must be one of {', '.join(choices)}, got {value!r}", option)


def given_options(params: Mapping[str, Any]) -> Options:
    """Returns the given parameters of a command as options of a client.

    Raises InvalidArgument for a logit bias of a wrong form and for a file that cannot be read.
    """
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
