"""Lets the processes of a service prove to each other that they belong to it.

This module is pure; `channel` carries the proofs. All processes share one secret, which is made
when the service is launched. The secret is never sent between peers: otherwise a caller would give
it away to any process that answers at the address of a dead worker or at a made-up address. Instead
every call has a message authentication code (HMAC-SHA256, RFC 2104), like an authenticator in
Kerberos (RFC 4120). The callee answers with another code before either side sends anything else:

    caller -> callee   time | nonce | MAC("call", time, nonce, method, target)
    callee -> caller   MAC("answer", the caller's whole proof)

- The target is the HOST:PORT that the caller dials, and a server accepts only calls to its own
  address. So a process that is called in place of a worker can neither use the proof at another
  worker, nor get an answer to it there.
- The time limits how long a proof can be used at a later server with the same address. Clocks of
  nodes may differ by MAX_SKEW_SECONDS.
- The method prevents the use of a proof for another method. The label prevents the use of an answer
  as a call.

Proofs do not protect the rest of a call against an attacker that can read or change packets between
two peers. That takes TLS, for which `tls` has the keys and certificates of both sides.
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
    """Holds the TLS files of peers, in PEM; the CA signs the certificate, which is for `name`."""

    ca: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    name: str


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Holds the secret and TLS files of a service. They are never shown."""

    secret: bytes = field(repr=False)
    tls: PeerTls | None = None  # None: plaintext

    def __post_init__(self) -> None:
        """Raises ValueError for a secret that is too short."""
        if len(self.secret) < SECRET_BYTES:
            raise ValueError(
                f"secret: must have at least {SECRET_BYTES} bytes, got {len(self.secret)}"
            )

    @classmethod
    def generate(cls, tls: PeerTls | None = None) -> Self:
        """Creates the identity of a new service."""
        return cls(secrets.token_bytes(SECRET_BYTES), tls)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parses a text of `to_text`. Raises ValueError for anything else."""
        secret, *tls = text.split()
        if not tls:
            return cls(bytes.fromhex(secret))
        name, *files = tls
        ca, certificate, key = map(bytes.fromhex, files)
        return cls(
            bytes.fromhex(secret), PeerTls(ca=ca, certificate=certificate, key=key, name=name)
        )

    def to_text(self) -> str:
        """Returns the identity as a line of text. Only send it over a pipe or a private file."""
        tls = self.tls
        words = [tls.name, tls.ca.hex(), tls.certificate.hex(), tls.key.hex()] if tls else []
        return " ".join([self.secret.hex(), *words])

    def make_proof(self, method: str, target: str) -> bytes:
        """Returns the proof for one call of `method` (/SERVICE/METHOD) at `target` (HOST:PORT)."""
        head = _HEAD.pack(time.time(), secrets.token_bytes(16))
        return head + self._call_mac(head, method, target)

    def accepts(self, proof: bytes, method: str, targets: Iterable[str]) -> bool:
        """Returns True if a caller just made this proof for this method at one of these targets."""
        if len(proof) != _HEAD.size + _MAC_BYTES:
            return False
        head = proof[: _HEAD.size]
        mac = proof[_HEAD.size :]
        (sent, _) = _HEAD.unpack(head)
        known = [
            hmac.compare_digest(self._call_mac(head, method, target), mac) for target in targets
        ]
        return any(known) and abs(time.time() - sent) <= MAX_SKEW_SECONDS

    def answer(self, proof: bytes) -> bytes:
        """Returns a server's answer to a proof that it has accepted."""
        return hmac.digest(self.secret, b"answer" + proof, "sha256")

    def is_answer(self, answer: bytes, proof: bytes) -> bool:
        """Returns True if the answer to this proof comes from a peer of the service."""
        return hmac.compare_digest(self.answer(proof), answer)

    def _call_mac(self, head: bytes, method: str, target: str) -> bytes:
        # The concatenation is unambiguous: the head has a fixed length, and a target has no NUL.
        return hmac.digest(self.secret, b"call" + head + f"{target}\0{method}".encode(), "sha256")
