"""`tandem batch`: answers the requests of a file, in this process or by a service."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

from ...proto.errors import InvalidArgument
from ...router.api.batches.lines import BatchRequest
from ...router.client.wire import ClientTls
from ..local.batch import (
    PATIENCE_SECONDS,
    BatchCounts,
    BatchOutput,
    answer_requests,
    read_requests,
)
from ..service_url import ServiceAccess
from ..tables import progress_bar
from . import options as o

_CONCURRENCY = 32
_OPTIONS: Final = {
    "tensor_parallel_size": "--tp",
    "max_model_len": "--context-tokens",
    "max_num_seqs": "--max-sequences",
}
"""The options that have another name than their argument of `LLM`."""


def batch(
    requests: Annotated[
        Path, typer.Argument(metavar="INPUT", help="JSONL in the format of OpenAI's batches.")
    ],
    output: Annotated[
        Path, typer.Argument(help="A JSONL file for the answers; its lines are kept.")
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Run this model in this process, named as for `tandem serve`."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Ask a service instead, or a server of OpenAI's API: any address that has an "
            f"HTTP API; without --model by default {o.URL_VARIABLE}."
        ),
    ] = None,
    tp: Annotated[
        int, typer.Option(help="With --model: ranks (processes) that share the model.")
    ] = 1,
    dtype: Annotated[
        str, typer.Option(help="With --model: float32, bfloat16 or float16.")
    ] = "bfloat16",
    device: Annotated[str, typer.Option(help="With --model: cpu or cuda.")] = "cpu",
    kv_cache_gb: Annotated[
        float | None,
        typer.Option(
            help="With --model: GiB of KV cache of each process; by default the rest of its "
            "memory, on CPUs at most 1."
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="With --model: the part of its GPU that a process may use.")
    ] = 0.9,
    context_tokens: Annotated[
        int | None,
        typer.Option(help="With --model: the longest prompt plus completion, in tokens."),
    ] = None,
    max_sequences: Annotated[
        int | None,
        typer.Option(
            help="With --model: sequences in one batch at most; by default 256, on CPUs 64."
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="With --model: the model's name in the requests.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, help="With --url: concurrent requests.")
    ] = _CONCURRENCY,
    patience: Annotated[
        float, typer.Option(min=0, help="With --url: seconds to retry a request at a busy service.")
    ] = PATIENCE_SECONDS,
    api_key_file: o.ApiKeyFile = None,
    tls_ca: o.TlsCa = None,
    tls_certificate: o.TlsCertificate = None,
    tls_key: o.TlsKey = None,
) -> None:
    """Answer the requests of INPUT; each answer is a line of OUTPUT, in the order of completion.

    A line of INPUT: {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body":
    {...}}; other urls: /v1/completions, /v1/embeddings, /v1/responses. A line of OUTPUT has the
    custom_id, and a response with status_code and body, also for a refused request. An interrupted
    or killed command continues when it is run again: each request is answered once.
    """
    if model is None and url is None:
        url = os.environ.get(o.URL_VARIABLE)
    if (model is None) == (url is None):
        raise InvalidArgument("give either --model or --url", "--model")
    found = read_requests(requests)
    with BatchOutput(output, [request.custom_id for request in found]) as answers:
        if url is not None:
            service = ServiceAccess(
                url=url,
                api_key=o.read_api_key(api_key_file),
                tls=ClientTls(ca=tls_ca, certificate=tls_certificate, key=tls_key),
            )
            counts = asyncio.run(_ask(service, found, answers, concurrency, patience))
        else:
            from ..local.llm import LLM

            with (
                _naming_options(),
                LLM(
                    model or "",
                    tensor_parallel_size=tp,
                    dtype=dtype,
                    device=device,
                    kv_cache_gb=kv_cache_gb,
                    gpu_memory_utilization=gpu_memory_utilization,
                    max_model_len=context_tokens,
                    max_num_seqs=max_sequences,
                    served_model_name=served_model_name,
                ) as llm,
            ):
                counts = llm.answer_batch(found, answers)
    typer.echo(
        f"{counts.total} requests: {counts.skipped} answered before, {counts.answered} now, "
        f"{counts.failed} of these with an error",
        err=True,
    )


@contextmanager
def _naming_options() -> Iterator[None]:
    """Makes an error name the option instead of the argument of `LLM`."""
    try:
        yield
    except InvalidArgument as error:
        if error.field not in _OPTIONS:
            raise
        reason = error.message.removeprefix(f"{error.field}: ")
        raise InvalidArgument(reason, _OPTIONS[error.field]) from None


async def _ask(
    service: ServiceAccess,
    requests: list[BatchRequest],
    answers: BatchOutput,
    concurrency: int,
    patience: float,
) -> BatchCounts:
    from ..local.batch_senders import service_sender

    url = service.api_url()
    with progress_bar("requests", len(requests)) as update:
        update(advance=len(answers.answered))
        async with service_sender(url, service.api_key, service.tls) as send:
            return await answer_requests(
                requests,
                answers,
                send,
                concurrency=concurrency,
                patience_seconds=patience,
                on_answer=lambda: update(advance=1),
            )
