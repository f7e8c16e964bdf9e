"""Measures the electrical power of the host's CPU packages from the energy counters of RAPL.

Source: the kernel's Documentation/power/powercap/powercap.rst. Linux counts the energy of Intel's
and AMD's processors in the same files, which only root may read unless an administrator allows it.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

_ZONES: Final = "sys/class/powercap/intel-rapl:*"
_PACKAGE: Final = "package"  # how the names of packages begin; "psys" would count them again
_LEAST_SECONDS: Final = 0.1  # between two readings: the counters move about once in a millisecond
# A counter holds at least 60 kJ: at 1,000 W it wraps around within a minute, and in a longer time
# perhaps more than once.
_MOST_SECONDS: Final = 60.0
_MICROJOULES: Final = 1e6  # in a joule


class CpuPower:
    """Reads the power of all CPU packages of the host, also what other processes use."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, root: Path = Path("/")) -> None:
        """`clock` returns seconds; `root` holds sys."""
        self._clock = clock
        self._has_warned = False
        self._at = 0.0  # when `_energies` was read
        self._energies: dict[Path, int] = {}  # microjoules by the folder of a package
        self._watts: float | None = None
        self._zones = [zone for zone in sorted(root.glob(_ZONES)) if _is_package(zone)]

    def watts(self) -> float | None:
        """Returns the mean power since the last call; None if it is not known.

        It is not known in the first call, after a break in which a counter may have wrapped around
        more than once, on a host without counters, and without the right to read them.
        """
        now = self._clock()
        seconds = now - self._at
        if self._energies and seconds < _LEAST_SECONDS:
            return self._watts
        try:
            energies = {zone: _number(zone / "energy_uj") for zone in self._zones}
            joules = sum(
                _used(zone, self._energies[zone], energy)
                for zone, energy in energies.items()
                if zone in self._energies
            )
        except (OSError, ValueError) as error:
            self._warn_once(error)
            energies = {}
            joules = 0.0
        is_known = bool(energies) and energies.keys() == self._energies.keys()
        self._watts = joules / seconds if is_known and seconds <= _MOST_SECONDS else None
        self._at = now
        self._energies = energies
        return self._watts

    def _warn_once(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.info("the power of the CPUs cannot be read: %s", error)


def _is_package(zone: Path) -> bool:
    try:
        return (zone / "name").read_text().startswith(_PACKAGE)
    except OSError:
        return False


def _used(zone: Path, before: int, now: int) -> float:
    """Returns the joules between two readings of a counter, which may have wrapped around once."""
    microjoules = now - before
    if microjoules < 0:
        microjoules += _number(zone / "max_energy_range_uj")
    return microjoules / _MICROJOULES


def _number(file: Path) -> int:
    return int(file.read_text())
