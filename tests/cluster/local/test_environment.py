"""Tests which variables all processes of a local Ray have."""

import os

import pytest

from tandem.cluster.config import load_config
from tandem.cluster.local.environment import SPINNING, compute_environment, shared_environment
from tandem.cluster.serve.environment import set_environment


def test_variables_with_one_value_are_shared() -> None:
    config = load_config(None, {"model": "m", "prefill.num_threads": 1, "decode.num_threads": 1})
    shared = shared_environment(config)
    assert shared.items() >= compute_environment(config.decode).items()
    assert shared["OMP_NUM_THREADS"] == "1"
    assert shared["TOKENIZERS_PARALLELISM"] == "false"


def test_variables_whose_values_differ_are_not_shared() -> None:
    config = load_config(None, {"model": "m", "prefill.num_threads": 1, "decode.num_threads": 2})
    assert "OMP_NUM_THREADS" not in shared_environment(config)
    assert shared_environment(config).items() >= SPINNING.items()


def test_a_pool_without_workers_does_not_count() -> None:
    overrides = {"prefill.replicas": 0, "prefill.num_threads": 1, "decode.num_threads": 2}
    config = load_config(None, {"model": "m", **overrides})
    assert shared_environment(config)["OMP_NUM_THREADS"] == "2"


def test_variables_are_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_KNOWN", "before")
    with set_environment({"TANDEM_KNOWN": "within", "TANDEM_NEW": "within"}):
        assert os.environ["TANDEM_KNOWN"] == os.environ["TANDEM_NEW"] == "within"
    assert os.environ["TANDEM_KNOWN"] == "before"
    assert "TANDEM_NEW" not in os.environ
