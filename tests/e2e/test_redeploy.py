"""A service that is started again under its name replaces the one that runs: no stream is lost or
computed again.
"""

from pathlib import Path

from tandem.proto.addresses import free_port


def test_a_service_is_replaced_under_streams(address: str, tmp_path: Path) -> None:
    from tandem.tests.soak.nemesis import MODEL
    from tandem.tests.soak.redeploy import make_configs, replace_under_streams
    from tandem.tests.tiny import make_tiny_model

    folder = make_tiny_model(
        tmp_path, dtype="bfloat16", **MODEL
    )  # whose logits are the same bits in any company
    configs = make_configs(folder, "replaced", free_port("127.0.0.1"), num_routers=1, num_workers=1)
    found = replace_under_streams(*configs, folder, address, streams=16, tokens=150)
    print(found)
    assert found.passed, str(found)
    assert found.num_probes > 2
