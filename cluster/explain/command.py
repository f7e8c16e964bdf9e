"""`tandem explain`: runs a prompt and shows the arithmetic of each step next to its time."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

import psutil
import typer

from ...proto.addresses import is_loopback
from ...proto.errors import InvalidArgument, TandemError
from ...router.client.client import Client
from ...router.client.types import Options
from ...workers.host.power import CpuPower
from ...workers.kv_cache.layout import ITEM_BYTES
from ...workers.model.costs.inference import InferenceCost
from ...workers.model.costs.roofline import DEVICES, Roofline
from ..arithmetic import make_cost
from ..cli import options as o
from ..service_url import ServiceAccess
from ..store.store import BUILT_IN
from ..text_files import check_writable
from .cost import read_model_config
from .gather import Subject, explain
from .page import write_page
from .text import print_text

_DEMO: Final = next(iter(BUILT_IN))
_REQUEST: Final = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "typical_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("stop", "stop_token_ids", "ignore_eos", "min_tokens"),
)
_KV_CACHE_GB: Final = 1.0
_MEASURED_ROWS: Final = 512  # rows of the measured matrix products


@o.request_options(*_REQUEST, max_tokens=16, temperature=0.8, top_k=40, top_p=0.95, seed=0)
@o.service_options("")
def explain_command(
    context: typer.Context,
    service: ServiceAccess,
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    model: Annotated[
        str | None,
        typer.Option(
            help=f"A model, named as for `tandem serve`; by default {_DEMO}. With --url the path "
            "or the hub id of its model; not needed for a built-in one."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    candidates: Annotated[
        int, typer.Option(help="The likeliest tokens to show for each step.", min=1, max=20)
    ] = 5,
    recompute: Annotated[
        bool,
        typer.Option(help="Compute each token again without KV cache, to measure the difference."),
    ] = True,
    device: Annotated[
        str | None,
        typer.Option(
            help="Compare times with the limits of this GPU instead of this machine: "
            f"{', '.join(DEVICES)}."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write one page with everything to this file.")
    ] = None,
) -> None:
    """Show what happens when PROMPT is continued, with the arithmetic next to the measured times.

    Tokens, shapes, FLOPs and bytes of prefill and decode, KV cache, candidates before and after
    temperature and filters, and the time of each step next to its floor. Without --url the model
    runs in this process, without prefix cache; with --url in a running service.
    """
    o.check_choice("--dtype", dtype, ITEM_BYTES)
    if device is not None:
        o.check_choice("--device", device, DEVICES)
    check_writable({"--html": html})
    options = o.given_options(context.params)
    options.pop("model", None)  # the arithmetic's; a service may serve it by another name
    if options["max_tokens"] == 0:
        raise InvalidArgument("must be at least 1: each token is explained", "--max-tokens")
    with _open(service, model, dtype, device) as subject:
        found = explain(subject, prompt, options, num_candidates=candidates, recompute=recompute)
    if html is not None:
        write_page(found, html)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2, ensure_ascii=False))
    elif html is None:
        print_text(found)
    else:
        typer.echo(f"{html}: written")


@contextmanager
def _open(
    service: ServiceAccess, model: str | None, dtype: str, device: str | None
) -> Iterator[Subject]:
    """Opens the engine: a running service if a URL is given, else a model in this process."""
    if service.url:
        with _open_service(service, model, dtype, device) as subject:
            yield subject
        return
    # torch takes a second, and a service needs none of it.
    from ..local.llm import LLM

    name = model or _DEMO
    cost, limits = _arithmetic(name, dtype, device)
    power = CpuPower()
    with LLM(name, dtype=dtype, kv_cache_gb=_KV_CACHE_GB, enable_prefix_caching=False) as llm:
        # The first request of a process finds nothing in the processor's caches.
        llm.generate("Hello", Options(max_tokens=2), progress=False)
        yield Subject(
            model=name,
            engine="in this process",
            cost=cost,
            roofline=limits,
            open_stream=llm.stream,
            memory=lambda: {"process": psutil.Process().memory_info().rss},
            watts=lambda: {} if (watts := power.watts()) is None else {"cpu": watts},
        )


@contextmanager
def _open_service(
    service: ServiceAccess, model: str | None, dtype: str, device: str | None
) -> Iterator[Subject]:
    place = service.url.rpartition("://")[2].partition("/")[0].partition(",")[0]
    if device is None and not is_loopback(urlsplit(f"//{place}").hostname or ""):
        raise InvalidArgument(
            "must name the GPU of a service on another machine, because its limits cannot be "
            f"measured from here; one of {', '.join(DEVICES)}",
            "--device",
        )
    name = model or _known_model(service)
    cost, limits = _arithmetic(name, dtype, device)
    with service.connect(Client) as client:
        yield Subject(
            model=name,
            engine=service.url,
            cost=cost,
            roofline=limits,
            open_stream=lambda prompt, options: client.stream(prompt, **options),
            memory=dict,
            watts=lambda: _watts(service),
        )


def _known_model(service: ServiceAccess) -> str:
    """Returns the model of a service by its served name.

    Raises InvalidArgument if that is neither a built-in name nor like a hub id: a folder of this
    name may hold another model.
    """
    name = str(service.status()[1]["model"])
    if name not in BUILT_IN and "/" not in name:
        raise InvalidArgument(
            f"must be the path or the hub id of the model that the service calls {name!r}",
            "--model",
        )
    return name


def _watts(service: ServiceAccess) -> dict[str, float]:
    """Returns the power that the workers of a service report, if its status can be read."""
    found = {}
    with suppress(TandemError):
        for worker in service.status()[1]["workers"]:
            for kind in ("cpu", "gpu"):
                if (watts := worker.get(f"{kind}_power_watts")) is not None:
                    found[f"{kind} of {worker['id']}"] = float(watts)
    return found


def _arithmetic(name: str, dtype: str, device: str | None) -> tuple[InferenceCost, Roofline]:
    """Returns the arithmetic of a model and the limits of a device; None: of this machine."""
    config = read_model_config(name)
    cost = make_cost(config, dtype)
    if device is not None:
        return cost, DEVICES[device].roofline
    # With torch, which takes a second.
    from .machine import measure_machine

    return cost, measure_machine(config, dtype, _MEASURED_ROWS)
