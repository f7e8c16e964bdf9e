"""Measures the cost of peer proofs per call: `python -m tandem.tests.bench.engine.identity`.

Messages within a stream cost nothing more.
"""

import argparse
import sys
import timeit
from collections.abc import Callable
from functools import partial

from tandem.proto.identity import PeerIdentity

_METHOD = "/tandem.v1.Worker/Session"
_TARGET = "10.0.0.1:50051"


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints; returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tandem.tests.bench.engine.identity", description=__doc__
    )
    parser.add_argument("--repeat", type=int, default=20_000, help="calls to measure, five times")
    options = parser.parse_args(arguments)
    identity = PeerIdentity.generate()
    proof = identity.make_proof(_METHOD, _TARGET)
    steps: dict[str, Callable[[], object]] = {
        "caller makes the proof": partial(identity.make_proof, _METHOD, _TARGET),
        "callee checks it": partial(identity.accepts, proof, _METHOD, [_TARGET]),
        "callee answers": partial(identity.answer, proof),
        "caller checks the answer": partial(identity.is_answer, identity.answer(proof), proof),
    }
    for name, step in steps.items():
        seconds = min(timeit.repeat(step, number=options.repeat, repeat=5)) / options.repeat
        print(f"{name:25} {1e6 * seconds:6.2f} us a call")
    return 0


if __name__ == "__main__":
    sys.exit(main())
