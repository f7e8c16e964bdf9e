"""A service that is started again under its name replaces the one that runs: no stream is lost or computed again."""

from pathlib import Path

import pytest

from tandem.tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_a_service_is_replaced_under_streams(address: str, model: Path) -> None:
    from tandem.tests.soak.redeploy import make_configs, replace_under_streams

    configs = make_configs(model, "replaced", 8123, num_routers=1, num_workers=1)
    found = replace_under_streams(*configs, model, address, streams=16, tokens=300)
    print(found)
    assert found.passed, str(found)
    assert found.num_probes > 2
