"""Makes the interpreter of GPU kernels faster for the tests of this folder."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def faster_interpreter() -> None:
    # Imports Triton, which reads TRITON_INTERPRET; tests/conftest.py sets it after this import.
    from tandem.tests.triton_interpreter import make_faster

    make_faster()
