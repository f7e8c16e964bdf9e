"""Whatever bytes come, each parser takes them or fails in its documented way.

`make fuzz` does the same with 2,000 inputs for each parser instead of 100. `python -m
tandem.tests.fuzz.coverage NAME` is guided by coverage, where atheris is installed.
"""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tandem.tests.fuzz.mutations import inputs
from tandem.tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_takes_its_seeds(name: str) -> None:
    """Else the changes to them would reach little of it."""
    target = TARGETS[name]
    taken = 0
    for seed in target.seeds:
        try:
            target.read(seed)
            taken += 1
        except target.raises:
            pass
    assert taken or name in (
        "event id",
        "safetensors index",
    )  # these need what else belongs to them


@pytest.mark.parametrize("name", TARGETS)
@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_parser_fails_in_its_documented_way_alone(name: str, data: st.DataObject) -> None:
    TARGETS[name](data.draw(inputs(TARGETS[name].seeds)))


def test_a_parser_that_fails_otherwise_is_found() -> None:
    from tandem.tests.fuzz.targets import Target

    def broken(data: bytes) -> int:
        return 1 // len(data.partition(b"\xff")[0] or b"x") if b"\xff" not in data else data[1_000]

    target = Target(read=broken, raises=(ValueError,), seeds=[b"abc"])

    @settings(database=None, max_examples=500, phases=[Phase.generate])
    @given(inputs(target.seeds))
    def run(data: bytes) -> None:
        target(data)

    with pytest.raises(IndexError):
        run()
