"""Lets the processes of a service prove to each other that they belong to it. Pure; `channel`
carries the proofs.

All of them have one secret, which is made when the service is launched, and which never travels
between peers: a caller that sent it would give it away to whoever answers at the address of a
worker that has died, or at an address that somebody has made up. Instead every call has a message
authentication code (HMAC-SHA256, RFC 2104), as an authenticator has in Kerberos (RFC 4120), and the
callee answers with another before either side sends anything else:

    caller -> callee   time | nonce | MAC("call", time, nonce, method, target)
    callee -> caller   MAC("answer", what the caller has sent)

- The target is HOST:PORT as the caller dials it, and a server takes calls to its own address only.
  So whoever is called in the place of a worker can neither use what it has got at another worker,
  nor fetch from there an answer to it.
- The time bounds how long a proof is of use at a later server with the same address. Clocks of
  nodes may differ by MAX_SKEW_SECONDS.
- The method keeps a proof for one method from being used for another, the label an answer from
  being used as a call.

Who can read or change the packets between two peers is not kept from what follows the proofs: that
takes TLS, for which `tls` has what both sides show.
"""

import hmac
import secrets
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Self

SECRET_BYTES: Final = 32
MAX_SKEW_SECONDS: Final = 120.0

_HEAD: Final = struct.Struct(">d16s")
_MAC_BYTES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTls:
    """Holds what peers need for TLS on both sides, in PEM: the certificate is under the CA, and is
    for `name`.
    """

    ca: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    name: str


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Holds what a process shows to its peers, and what it expects of them. Is never shown itself."""

    secret: bytes = field(repr=False)
    tls: PeerTls | None = None  # None: plaintext

    def __post_init__(self) -> None:
        """Raises ValueError for a secret that could be guessed."""
        if len(self.secret) < SECRET_BYTES:
            raise ValueError(
                f"secret: must have at least {SECRET_BYTES} bytes, got {len(self.secret)}"
            )

    @classmethod
    def generate(cls, tls: PeerTls | None = None) -> Self:
        """Makes the identity of a new service."""
        return cls(secrets.token_bytes(SECRET_BYTES), tls)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Reads what `to_text` has returned. Raises ValueError for anything else."""
        secret, *tls = text.split()
        if not tls:
            return cls(bytes.fromhex(secret))
        name, *files = tls
        ca, certificate, key = map(bytes.fromhex, files)
        return cls(
            bytes.fromhex(secret), PeerTls(ca=ca, certificate=certificate, key=key, name=name)
        )

    def to_text(self) -> str:
        """Returns all of it as a line of text, for a pipe or a file that nobody else reads."""
        tls = self.tls
        words = [tls.name, tls.ca.hex(), tls.certificate.hex(), tls.key.hex()] if tls else []
        return " ".join([self.secret.hex(), *words])

    def make_proof(self, method: str, target: str) -> bytes:
        """Returns what a caller sends with one call of `method` (/SERVICE/METHOD) at `target`
        (HOST:PORT).
        """
        head = _HEAD.pack(time.time(), secrets.token_bytes(16))
        return head + self._call_mac(head, method, target)

    def accepts(self, proof: bytes, method: str, targets: Iterable[str]) -> bool:
        """Returns whether a caller has made the proof, now, for this method at one of these
        targets.
        """
        if len(proof) != _HEAD.size + _MAC_BYTES:
            return False
        head, mac = proof[: _HEAD.size], proof[_HEAD.size :]
        (sent, _) = _HEAD.unpack(head)
        known = [
            hmac.compare_digest(self._call_mac(head, method, target), mac) for target in targets
        ]
        return any(known) and abs(time.time() - sent) <= MAX_SKEW_SECONDS

    def answer(self, proof: bytes) -> bytes:
        """Returns what a server answers to a proof that it has accepted."""
        return hmac.digest(self.secret, b"answer" + proof, "sha256")

    def is_answer(self, answer: bytes, proof: bytes) -> bool:
        """Returns whether a peer of the service answers to this proof."""
        return hmac.compare_digest(self.answer(proof), answer)

    def _call_mac(self, head: bytes, method: str, target: str) -> bytes:
        # Unambiguous: the head is of fixed length, and a target has no NUL.
        return hmac.digest(self.secret, b"call" + head + f"{target}\0{method}".encode(), "sha256")
