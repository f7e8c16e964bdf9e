"""Tests the context that a router serves while workers hold less than the model's."""

import pytest

from tandem.cluster.config import load_config
from tandem.cluster.serve.views.context_limit import ContextLimit
from tandem.proto import worker_pb2
from tandem.router.api.service import GenerationService
from tandem.router.frontend.served_model import ServedModel
from tandem.tests.router.fake_source import FakeTokenSource, byte_tokenizer

TOKEN_BYTES = 114_688
WARNING = (
    "context: a worker holds 9,362 of the model's 40,960 tokens, because its KV cache has 1.00 "
    "GiB; raise kv_cache_gb"
)


def make_service() -> GenerationService:
    model = ServedModel(name="m", tokenizer=byte_tokenizer(), context_tokens=40_960)
    return GenerationService([model], FakeTokenSource(), names=["other"], aliases=["alias"])


def make_limit(service: GenerationService, **config: object) -> ContextLimit:
    return ContextLimit(service, load_config(None, {"model": "m", **config}))


def worker(
    context_tokens: int, role: "worker_pb2.Role" = worker_pb2.ROLE_DECODE, tp: int = 1
) -> worker_pb2.WorkerInfo:
    return worker_pb2.WorkerInfo(
        role=role, context_tokens=context_tokens, kv_bytes_per_token=TOKEN_BYTES, tp=tp
    )


def served(service: GenerationService) -> set[tuple[int, int | None]]:
    """What every name of the model offers, and what each worker holds of it."""
    models = [*service.models, service.model("alias"), service.model("")]
    return {(each.context_tokens, each.common_tokens) for each in models}


def test_the_context_follows_the_decode_workers() -> None:
    service = make_service()
    limit = make_limit(service)
    assert served(service) == {(40_960, None)}
    prefill = worker(128, worker_pb2.ROLE_PREFILL)
    steps: list[tuple[list[worker_pb2.WorkerInfo], tuple[int, int | None]]] = [
        ([prefill], (40_960, None)),
        ([prefill, worker(9_362), worker(0)], (9_362, 9_362)),  # one of them has not told
        ([prefill], (9_362, 9_362)),
        ([], (9_362, 9_362)),
        ([worker(20_000), worker(9_362)], (20_000, 9_362)),
        ([worker(50_000), worker(9_362)], (40_960, 9_362)),
        ([worker(50_000)], (40_960, 40_960)),
    ]
    for workers, expected in steps:
        limit.update(workers)
        assert served(service) == {expected}


def test_the_warning_comes_once_for_each_change(caplog: pytest.LogCaptureFixture) -> None:
    limit = make_limit(make_service())
    for _ in range(2):
        limit.update([worker(40_960), worker(9_362)])
        limit.update([worker(20_000), worker(9_362)])
        limit.update([])
    assert (limit.warning, caplog.messages) == (WARNING, [WARNING])
    limit.update([worker(9_000)])
    assert len(caplog.messages) == 2
    limit.update([worker(40_960)])
    assert (limit.warning, len(caplog.messages)) == ("", 2)


def test_the_warning_names_the_field_that_helps() -> None:
    limit = make_limit(make_service(), context_tokens=40_960)
    limit.update([worker(9_362, tp=2)])
    assert limit.warning == (
        "context: a worker holds 9,362 of the configured 40,960 tokens, because its KV cache has "
        "0.50 GiB in each rank; raise kv_cache_gb"
    )
    for kv_cache_gb, remedy in (
        (None, "gpu_memory_utilization or num_gpus"),
        (1.0, "kv_cache_gb"),
    ):
        limit = make_limit(make_service(), device="cuda", **{"decode.kv_cache_gb": kv_cache_gb})
        limit.update([worker(9_362)])
        assert limit.warning.endswith(f"; raise {remedy}")
