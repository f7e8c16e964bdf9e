"""Builds worker configurations from flat fields."""

from dataclasses import fields
from typing import Any

from tandem.tests.peers import IDENTITY
from tandem.tests.waits import NEVER
from tandem.workers.engine.config import Budgets, SpeculativeConfig
from tandem.workers.serve.worker import WorkerConfig
from tandem.workers.tp.rank import RankConfig


def worker_config(model: str = "", **values: Any) -> WorkerConfig:
    """A WorkerConfig from the fields of WorkerConfig, Budgets and RankConfig together, as JSON may
    have them.

    KV cache that a request has left is not freed by its lease alone, unless a test says so.
    """
    values.setdefault("lease_seconds", NEVER)
    if isinstance(values.get("speculative"), dict):
        values["speculative"] = SpeculativeConfig(**values["speculative"])
    budgets = {
        field.name: values.pop(field.name) for field in fields(Budgets) if field.name in values
    }
    own = {each.name: values.pop(each.name) for each in fields(WorkerConfig) if each.name in values}
    return WorkerConfig(
        rank=RankConfig(model=model, **({"identity": IDENTITY} | values)),
        budgets=Budgets(**budgets),
        **own,
    )
