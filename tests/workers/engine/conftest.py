"""Makes the engine's tests run without overlap and with it, on a device that is ahead and on one
that is behind.
"""

import functools

import pytest

from tandem.tests.workers.engine.drive import MakeWorker, make_worker

OVERLAPS = {
    "stepwise": {},
    "overlap": {"overlap": True},
    "overlap late": {"overlap": True, "late": True},
}


@pytest.fixture(params=list(OVERLAPS))
def worker(request: pytest.FixtureRequest) -> MakeWorker:
    return functools.partial(make_worker, **OVERLAPS[request.param])
