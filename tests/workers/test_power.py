"""Tests the power of CPU packages, measured from files as the kernel writes them."""

import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.workers.host.power import CpuPower

RANGE = 262_143_328_850  # microjoules, of a Xeon


class Host:
    """Keeps the files of RAPL of a host, and a clock."""

    def __init__(self, root: Path, names: tuple[str, ...] = ("package-0", "package-1")) -> None:
        self.now = 1000.0
        self.root = root
        self._zones = [root / f"sys/class/powercap/intel-rapl:{i}" for i in range(len(names))]
        for zone, name in zip(self._zones, names, strict=True):
            zone.mkdir(parents=True, exist_ok=True)
            (zone / "name").write_text(name + "\n")
            (zone / "max_energy_range_uj").write_text(f"{RANGE}\n")
        self.count(*([0] * len(names)))

    def count(self, *energies: int) -> None:
        for zone, energy in zip(self._zones, energies, strict=True):
            (zone / "energy_uj").write_text(f"{energy}\n")

    def power(self) -> CpuPower:
        return CpuPower(lambda: self.now, self.root)

    @property
    def counters(self) -> list[Path]:
        return [zone / "energy_uj" for zone in self._zones]


@given(
    start=st.integers(0, RANGE - 1),
    watts=st.lists(st.integers(0, 400), min_size=1, max_size=6),
    seconds=st.floats(0.2, 59.0),
)
def test_the_power_is_the_mean_since_the_last_reading_also_over_a_wraparound(
    tmp_path_factory: pytest.TempPathFactory, start: int, watts: list[int], seconds: float
) -> None:
    host = Host(tmp_path_factory.getbasetemp() / "host")
    energies = [start, RANGE - 1 - start]
    host.count(*energies)
    power = host.power()
    assert power.watts() is None
    for each in watts:
        host.now += seconds
        energies = [(energy + round(each * seconds * 1e6)) % RANGE for energy in energies]
        host.count(*energies)
        assert power.watts() == pytest.approx(2 * each, abs=0.01)


def test_only_packages_count(tmp_path: Path) -> None:
    host = Host(tmp_path, ("package-0", "psys"))
    power = host.power()
    power.watts()
    host.now += 2.0
    host.count(100_000_000, 900_000_000)
    assert power.watts() == 50.0
    host.now += 0.01  # too soon for another figure
    assert power.watts() == 50.0


def test_no_figure_is_given_that_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert CpuPower(root=tmp_path).watts() is None  # a host without counters
    host = Host(tmp_path)
    power = host.power()
    power.watts()
    host.now += 61.0  # a counter may have wrapped around more than once
    host.count(5_000_000, 5_000_000)
    assert power.watts() is None
    host.now += 1.0
    host.count(6_000_000, 6_000_000)
    assert power.watts() == 2.0
    secret = host.counters[1]

    def read_text(path: Path, *args: object) -> str:
        if path == secret:
            raise PermissionError(13, os.strerror(13), str(path))
        return path.read_bytes().decode()

    monkeypatch.setattr(Path, "read_text", read_text)  # root may read any file
    with caplog.at_level(logging.INFO, "tandem.workers.host.power"):
        for _ in range(3):
            host.now += 1.0
            assert power.watts() is None
    (record,) = caplog.records
    assert "Permission denied" in record.message
    monkeypatch.undo()
    host.now += 1.0
    assert power.watts() is None, "the first reading after the break"
    host.now += 1.0
    host.count(9_000_000, 6_000_000)
    assert power.watts() == 3.0
