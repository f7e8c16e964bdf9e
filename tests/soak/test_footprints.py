"""Tests of who is judged: nobody whose figures are missing passes for one that does not grow."""

from collections.abc import Collection

import pytest

from tandem.tests.soak.footprints import JUDGED, Footprints


def footprints(
    *, leaks: tuple[str, str] | None = None, missing: Collection[tuple[str, str]] = ()
) -> Footprints:
    """Returns twenty samples of one process of each kind."""
    made = Footprints(_num_samples=20)
    for kind, figures in JUDGED.items():
        for figure in figures:
            if (kind, figure) not in missing:
                for n in range(20):
                    made._add(
                        60.0 * n, kind, "1", figure, 50 + (n if (kind, figure) == leaks else n % 2)
                    )
    return made


def test_a_run_in_which_nothing_grows_has_no_fault() -> None:
    assert footprints().faults() == []


@pytest.mark.parametrize(
    ("kind", "figure"), [(kind, figure) for kind, of in JUDGED.items() for figure in of]
)
def test_what_grows_and_what_was_not_sampled_is_named(kind: str, figure: str) -> None:
    (grown,) = footprints(leaks=(kind, figure)).faults()
    assert grown.startswith(f"{kind} 1: {figure} grow")
    (missing,) = footprints(missing=[(kind, figure)]).faults()
    assert missing == f"no {kind} lived through enough samples of {figure} to judge"
