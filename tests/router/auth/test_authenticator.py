"""Tests the caller that the key of a call stands for."""

import gc
import tracemalloc
from datetime import UTC, datetime

import pytest

from tandem.proto.errors import Unauthenticated
from tandem.router.auth.authenticator import MAX_KEY_CHARACTERS, Authenticator
from tandem.tests.router.auth.keys import api_key

SECRET = b"s" * 32


def caller_of(authenticator: Authenticator, secret: str) -> str:
    return authenticator.caller(f"Bearer {secret}", "").tenant


def test_the_key_names_the_tenant_and_no_text_of_the_client_does() -> None:
    authenticator = Authenticator(
        [api_key("one", tenant="ada"), api_key("two", tenant="ada"), api_key("three")]
    )
    assert [caller_of(authenticator, secret) for secret in ("one", "two", "three")] == [
        "ada",
        "ada",
        "three",
    ]
    assert authenticator.caller("bearer   one ", "").tenant == "ada"
    for wrong in (
        None,
        "",
        "Bearer",
        "Bearer ",
        "Basic one",
        "one",
        "Bearer ada",
        "Bearer on",
        "Bearer one two",
    ):
        with pytest.raises(Unauthenticated):
            authenticator.caller(wrong, "")
    with pytest.raises(Unauthenticated):
        caller_of(authenticator, api_key("one").sha256)  # who reads the file cannot call


def test_the_longest_key_is_taken_and_a_longer_one_refused() -> None:
    longest = "k" * MAX_KEY_CHARACTERS
    authenticator = Authenticator([api_key(longest, name="n", tenant="t")])
    assert caller_of(authenticator, longest) == "t"
    with pytest.raises(Unauthenticated):
        caller_of(authenticator, longest + "k" * 1_000_000)


def test_a_tenant_has_one_prefix_cache_in_all_routers_and_others_cannot_name_it() -> None:
    keys = [api_key("one", tenant="ada"), api_key("two", tenant="ada"), api_key("three")]
    routers = [Authenticator(keys, secret=SECRET) for _ in range(2)]
    salts = [
        [router.caller(f"Bearer {secret}", "").cache_salt for secret in ("one", "two", "three")]
        for router in routers
    ]
    assert salts[0] == salts[1]
    assert salts[0][0] == salts[0][1] != salts[0][2]
    assert len(salts[0][0]) == 32
    other = Authenticator(keys, secret=b"another service")
    assert other.caller("Bearer one", "").cache_salt != salts[0][0]
    anonymous = Authenticator(secret=SECRET, share_anonymous_prefixes=False)
    assert anonymous.caller("Bearer one", "tenant ada").cache_salt not in salts[0]


def test_without_keys_all_callers_are_one_tenant() -> None:
    shared = Authenticator()
    callers = [
        shared.caller(given, peer)
        for given, peer in (("Bearer one", "a"), ("Bearer two", "b"), (None, "c"))
    ]
    assert {(caller.tenant, caller.cache_salt) for caller in callers} == {("", b"")}


def test_anonymous_callers_share_cached_prefixes_within_a_connection_alone() -> None:
    apart = Authenticator(secret=SECRET, share_anonymous_prefixes=False)
    first, again, other = (apart.caller(None, name) for name in ("first", "first", "other"))
    assert first.cache_salt == again.cache_salt != other.cache_salt
    assert {first.tenant, other.tenant} == {""}  # many connections do not make many tenants


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("sees_all", [True, False])
def test_shared_prefixes_give_callers_without_a_key_no_rights(share: bool, sees_all: bool) -> None:
    authenticator = Authenticator(share_anonymous_prefixes=share, anonymous_sees_all=sees_all)
    left = authenticator.caller_of("", "")  # the owner of a batch
    assert left is not None
    assert authenticator.caller(None, "a").sees_all is left.sees_all is sees_all


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("1.2.3.4:5", "1.2.3.4"),
        ("ipv4:1.2.3.4:6", "1.2.3.4"),  # gRPC's form
        (
            "2001:db8:1:2:3:4:5:6:7",
            "2001:db8:1:2::/64",
        ),  # one host can have all addresses of the network
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:8", "2001:db8:1:2::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:8", "fe80::/64"),
        ("no address:x:1", "no address:x"),
        ("", ""),
    ],
)
def test_anonymous_callers_take_turns_by_address(peer: str, address: str) -> None:
    for share in (True, False):
        caller = Authenticator(secret=SECRET, share_anonymous_prefixes=share).caller(
            None, "c", peer
        )
        assert (caller.tenant, caller.fairness_id) == ("", address)


def test_callers_with_a_key_take_turns_by_tenant() -> None:
    authenticator = Authenticator([api_key("one", tenant="both"), api_key("two", tenant="both")])
    assert {
        authenticator.caller(f"Bearer {name}", "1.2.3.4:5").fairness_id for name in ("one", "two")
    } == {"both"}


def test_priority_is_capped_by_the_key() -> None:
    caller = Authenticator([api_key("one", max_priority=3)]).caller("Bearer one", "")
    assert [caller.priority(wanted) for wanted in (-5, 3, 4, 100)] == [-5, 3, 3, 3]


@pytest.mark.parametrize("share", [True, False])
def test_callers_without_a_key_have_a_maximum_priority(share: bool) -> None:
    """By default it is the priority of a request that sets none."""
    caller = Authenticator(share_anonymous_prefixes=share).caller(None, "a")
    assert [caller.priority(wanted) for wanted in (-5, 0, 1, 100)] == [-5, 0, 0, 0]
    caller = Authenticator(share_anonymous_prefixes=share, anonymous_max_priority=7).caller(
        None, "a"
    )
    assert [caller.priority(wanted) for wanted in (-5, 7, 100)] == [-5, 7, 7]


def test_a_key_expires() -> None:
    now = datetime(2027, 1, 1, tzinfo=UTC).timestamp()
    times = iter([now - 1, now])
    authenticator = Authenticator(
        [api_key("one", expires=datetime(2027, 1, 1, tzinfo=UTC))], clock=lambda: next(times)
    )
    assert caller_of(authenticator, "one") == "one"
    with pytest.raises(Unauthenticated):
        caller_of(authenticator, "one")


def test_keys_are_replaced_while_calls_run() -> None:
    authenticator = Authenticator([api_key("one", max_streams=2), api_key("two")])
    caller = authenticator.caller("Bearer one", "")
    with caller.quota.call():
        authenticator.replace([api_key("one", max_streams=1, tenant="other")])
        again = authenticator.caller("Bearer one", "")
        assert (again.tenant, again.quota is caller.quota, again.quota.num_streams) == (
            "other",
            True,
            1,
        )
        authenticator.replace([])
        with pytest.raises(Unauthenticated):
            caller_of(authenticator, "one")
    assert caller.quota.num_streams == 0


def test_ten_thousand_random_keys_are_refused_in_constant_memory() -> None:
    authenticator = Authenticator([api_key("one")])

    def refuse(number: int) -> int:
        """Returns the number of bytes that are held afterwards."""
        for n in range(number):
            try:
                authenticator.caller(f"Bearer tandem-{n}", f"peer {n}")
            except Unauthenticated:
                continue
            raise AssertionError("a key that nobody made is taken")
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = refuse(100)
        assert refuse(10_000) - before < 10_000
    finally:
        tracemalloc.stop()
