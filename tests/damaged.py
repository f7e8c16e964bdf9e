"""Makes damaged messages, and finds what an answer to one must not show."""

import random
import re
from collections.abc import Sequence

NUM_INPUTS = 500
LEAK = re.compile(
    r"Traceback|File \"|\.py\b|\bline "
    r"\d|/(?:work|tmp|home|usr|root|opt)/|127\.0\.0\.1|localhost|0x[0-9a-f]{6}"
)


def damaged(seeds: Sequence[bytes]) -> list[bytes]:
    """Seeds with bytes changed, cut out, repeated or put in, always the same."""
    rng = random.Random(15)
    made: list[bytes] = []
    while len(made) < NUM_INPUTS:
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 4)):
            place = rng.randint(0, len(data))
            match rng.randint(0, 3):
                case 0:
                    data[place : place + 1] = bytes([rng.randint(0, 255)])
                case 1:
                    del data[place : place + rng.randint(1, 9)]
                case 2:
                    data[place:place] = data[: rng.randint(0, 20)]
                case 3:
                    data[place:place] = rng.choice(
                        [b"\xff" * 5, b"\x00", b"[", b'"', b"-", b"9" * 30, b"null", b"\\ud800"]
                    )
        made.append(bytes(data))
    return made
