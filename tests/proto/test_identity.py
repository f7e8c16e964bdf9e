"""What peers prove to each other: nothing but the right call, made now by who knows the secret, is
accepted.
"""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proto.identity import MAX_SKEW_SECONDS, PeerIdentity, PeerTls

SECRETS = st.binary(min_size=32, max_size=64)
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
OURS = PeerIdentity(bytes(range(32)))


@given(SECRETS, NAMES, NAMES)
def test_a_proof_is_accepted_where_it_was_made_for_and_its_answer_by_who_has_made_it(
    secret: bytes, method: str, target: str
) -> None:
    caller, callee = PeerIdentity(secret), PeerIdentity(secret)
    proof = caller.make_proof(method, target)
    assert callee.accepts(proof, method, ["127.0.0.1:1", target])
    assert caller.is_answer(callee.answer(proof), proof)


@given(NAMES, NAMES, NAMES, NAMES)
def test_a_proof_is_of_use_for_no_other_method_and_at_no_other_address(
    a: str, b: str, c: str, d: str
) -> None:
    assert OURS.accepts(OURS.make_proof(a, b), c, [d]) == ((a, b) == (c, d))


@given(SECRETS, SECRETS)
def test_another_secret_proves_nothing(ours: bytes, theirs: bytes) -> None:
    caller, callee = PeerIdentity(theirs), PeerIdentity(ours)
    proof = caller.make_proof("/S/M", "host:1")
    assert callee.accepts(proof, "/S/M", ["host:1"]) == (ours == theirs)
    assert caller.is_answer(callee.answer(proof), proof) == (ours == theirs)


@given(st.integers(min_value=0), st.integers(0, 7))
def test_no_bit_of_a_proof_or_its_answer_can_be_changed(place: int, bit: int) -> None:
    def flipped(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[place % len(data)] ^= 1 << bit
        return bytes(changed)

    proof = OURS.make_proof("/S/M", "host:1")
    assert not OURS.accepts(flipped(proof), "/S/M", ["host:1"])
    assert not OURS.is_answer(flipped(OURS.answer(proof)), proof)
    assert not OURS.is_answer(OURS.answer(proof), flipped(proof))


@given(st.binary(max_size=200))
def test_bytes_from_anywhere_are_no_proof_and_no_answer(data: bytes) -> None:
    assert not OURS.accepts(data, "/S/M", ["host:1"])
    assert not OURS.is_answer(data, OURS.make_proof("/S/M", "host:1"))


def test_what_is_sent_holds_neither_the_secret_nor_an_answer_and_never_twice_the_same() -> None:
    proofs = {OURS.make_proof("/S/M", "host:1") for _ in range(1000)}
    assert len(proofs) == 1000
    proof = proofs.pop()
    assert OURS.secret not in proof
    assert OURS.answer(proof) not in proof
    assert not OURS.is_answer(proof[-32:], proof), "a caller's own code is no answer to it"


@pytest.mark.parametrize(
    ("seconds", "is_accepted"),
    [
        *((each, True) for each in (0, MAX_SKEW_SECONDS - 1, 1 - MAX_SKEW_SECONDS)),
        *(
            (each, False)
            for each in (MAX_SKEW_SECONDS + 1, -MAX_SKEW_SECONDS - 1, float("inf"), float("nan"))
        ),
    ],
)
def test_a_proof_is_of_use_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch, seconds: float, is_accepted: bool
) -> None:
    now = time.time()
    monkeypatch.setattr("tandem.proto.identity.time.time", lambda: now + seconds)
    proof = OURS.make_proof("/S/M", "host:1")
    monkeypatch.setattr("tandem.proto.identity.time.time", lambda: now)
    assert OURS.accepts(proof, "/S/M", ["host:1"]) is is_accepted


@given(st.binary(max_size=31))
def test_a_secret_that_could_be_guessed_is_refused_without_being_shown(secret: bytes) -> None:
    with pytest.raises(ValueError, match="secret: must have at least 32 bytes, got") as refused:
        PeerIdentity(secret)
    assert not secret or repr(secret) not in str(refused.value)


def test_an_identity_shows_itself_in_no_text_by_accident() -> None:
    generated = PeerIdentity.generate()
    assert generated.secret != PeerIdentity.generate().secret
    assert str(generated) == repr(generated) == f"{generated}" == "PeerIdentity(tls=None)"
    assert PeerIdentity.from_text(f"{generated.to_text()}\n") == generated
    tls = PeerTls(ca=b"the ca\n", certificate=b"the certificate\n", key=b"the key\n", name="peer")
    encrypted = PeerIdentity.generate(tls)
    assert repr(encrypted) == "PeerIdentity(tls=PeerTls(name='peer'))"
    assert PeerIdentity.from_text(encrypted.to_text()) == encrypted
