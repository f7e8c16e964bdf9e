"""A service that is started again under its name replaces the one that runs: no stream is lost or computed again."""

from pathlib import Path

from tandem.tests.service import free_port


def test_a_service_is_replaced_under_streams(address: str, tiny_model: Path) -> None:
    from tandem.tests.soak.redeploy import make_configs, replace_under_streams

    configs = make_configs(tiny_model, "replaced", free_port(), num_routers=1, num_workers=1)
    found = replace_under_streams(*configs, tiny_model, address, streams=16, tokens=150)
    print(found)
    assert found.passed, str(found)
    assert found.num_probes > 2
