"""Which adapters a service answers with, as its routers share it, and who may change that."""

import asyncio
import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.serve.members import Directory, RouterInfo
from tandem.cluster.serve.views.member_view import DirectoryWatcher
from tandem.proto.errors import InvalidArgument, NotFound, Overloaded, PermissionDenied, TandemError
from tandem.proto.hashing import adapter_salt, hash_chain
from tandem.router import adapters
from tandem.router.adapters import AdapterAdmin, AdapterRegistry
from tandem.router.auth.authenticator import Caller
from tandem.router.dispatch.blocked_prompts import BlockedPrompts
from tandem.router.request import LoraAdapter
from tandem.tests.local_directory import LocalDirectory
from tandem.tests.token_request import token_request
from tandem.tests.waits import WAIT

OPERATOR = Caller()


def adapter(name: str, content: int = 1) -> LoraAdapter:
    return LoraAdapter(name=name, folder=f"/adapters/{name}", fingerprint=bytes([content]) * 16)


def read(name: str, folder: Path) -> LoraAdapter:
    return LoraAdapter(name=name, folder=str(folder), fingerprint=bytes(16))


async def accept(adapter: LoraAdapter) -> None:
    """All workers can use it."""


def test_no_prefix_is_shared_between_adapters_tenants_and_the_model() -> None:
    salts = [b"", b"a" * 32, b"b" * 32]
    prints = [b"", bytes([1]) * 16, bytes([2]) * 16]
    salted = [adapter_salt(salt, fingerprint) for salt in salts for fingerprint in prints]
    assert salted[::3] == salts, "without an adapter nothing changes"
    chains = {hash_chain(range(16), 16, salt)[0] for salt in salted}
    assert len(chains) == 9
    request = token_request(range(16), cache_salt=salts[1], adapter=adapter("one"))
    assert request.prefix_salt == adapter_salt(salts[1], prints[1])


def test_changes_are_kept_over_what_is_configured() -> None:
    registry = AdapterRegistry([adapter("a"), adapter("b")])
    registry.remove("a")
    registry.put(adapter("c"))
    assert [each.name for each in registry.adapters] == ["b", "c"]
    assert registry.get("a") is None
    registry.put(adapter("a", 9))
    assert registry.get("a") == adapter("a", 9)


def test_a_version_warns_of_changes_over_its_configuration(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = ("gone", "same", "sql")
    before = AdapterRegistry(map(adapter, names))
    before.put(adapter("sql", 2))
    before.put(adapter("same"))
    before.remove("gone")
    version = AdapterRegistry(adapter(name, 3 if name == "sql" else 1) for name in names)
    assert version.learn(before.shared())
    assert version.adapters == [adapter("same"), adapter("sql", 2)]
    assert sorted(record.getMessage() for record in caplog.records) == [
        "adapters.gone: the folder /adapters/gone is not served, because the adapter was unloaded "
        "at run time; load this folder at run time to serve it",
        "adapters.sql: the folder /adapters/sql is not served, because the adapter was loaded from "
        "/adapters/sql at run time; load this folder at run time to serve it",
    ]


def test_adapters_that_the_workers_refuse_are_not_served(caplog: pytest.LogCaptureFixture) -> None:
    """A router with other folders keeps the change, so that a later one counts."""
    before = AdapterRegistry()
    before.put(adapter("in"))
    for name in ("out", "configured"):
        before.put(replace(adapter(name, 2), folder=f"/adapters-of-old/{name}"))
    versions = [AdapterRegistry([adapter("configured")], [Path("/adapters")]) for _ in range(2)]
    for version in versions:
        version.learn(before.shared())
        assert version.adapters == [adapter("configured"), adapter("in")]
    assert caplog.text.count("is not served: its folder /adapters-of-old/out is outside of") == 2
    versions[0].put(adapter("out", 3))
    before.learn(versions[0].shared())
    versions[1].learn(before.shared())
    assert versions[1].get("out") == adapter("out", 3)


def test_at_the_limit_a_served_name_may_get_another_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapters, "MAX_ADAPTERS", 2)
    registry = AdapterRegistry([adapter("a"), adapter("b")])
    registry.put(adapter("b", 9))
    assert registry.get("b") == adapter("b", 9)
    with pytest.raises(Overloaded, match="2 adapters are served; unload one first"):
        registry.put(adapter("c"))


CHANGES = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from("abc"), st.integers(0, 3)), max_size=20
)


@given(CHANGES, st.randoms(use_true_random=False))
def test_routers_agree_whatever_the_order_of_their_messages(
    changes: list[tuple[int, str, int]], order: random.Random
) -> None:
    routers = [AdapterRegistry([adapter("a")]) for _ in range(3)]
    for who, name, content in changes:
        if content:
            routers[who].put(adapter(name, content))
        else:
            routers[who].remove(name)
        if content == 1:
            routers[0].learn(routers[who].shared())
    pairs = [(router, other) for router in routers for other in routers] * 3
    order.shuffle(pairs)
    for router, other in [
        *pairs,
        *itertools.product(routers, routers),
        *itertools.product(routers, routers),
    ]:
        router.learn(other.shared())
    assert len({tuple(router.adapters) for router in routers}) == 1
    assert not any(router.learn(routers[0].shared()) for router in routers), "nothing is news twice"


def test_too_many_adapters_are_refused_and_old_names_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapters, "MAX_ADAPTERS", 4)
    registry = AdapterRegistry([adapter("configured")])
    for index in range(20):
        registry.put(adapter(f"a{index}"))
        registry.remove(f"a{index}")
    registry.remove("configured")
    assert len(registry.shared()) == 5
    assert registry.get("configured") is None
    for index in range(4):
        registry.put(adapter(f"b{index}"))
    with pytest.raises(Overloaded):
        registry.put(adapter("one more"))


async def test_routers_learn_from_each_other_through_the_directory_and_after_it_was_lost() -> None:
    directory = LocalDirectory(Directory())
    infos = [
        RouterInfo(router_id=name, grpc_address="", http_address="") for name in ("a", "b", "c")
    ]
    registries, watchers = [AdapterRegistry() for _ in infos], [DirectoryWatcher() for _ in infos]
    blocked_prompts = [BlockedPrompts() for _ in infos]
    for each in zip(watchers[:2], infos, blocked_prompts, registries, strict=False):
        await directory.watch(*each)
    await directory.watch(
        watchers[0], infos[0], blocked_prompts[0], registries[0]
    )  # it knows of the second one now
    waiting = asyncio.create_task(
        directory.watch(watchers[1], infos[1], blocked_prompts[1], registries[1])
    )
    sharing = asyncio.create_task(
        directory.keep_sharing(watchers[0], blocked_prompts[0], registries[0])
    )
    await asyncio.sleep(0)
    registries[0].put(adapter("new"))
    async with asyncio.timeout(WAIT):
        await waiting
    assert registries[1].get("new") == adapter("new")
    sharing.cancel()
    again = LocalDirectory(Directory())
    for _ in range(2):  # with the first it notices that this directory is another one
        await again.watch(watchers[1], infos[1], blocked_prompts[1], registries[1])
    await again.watch(watchers[2], infos[2], blocked_prompts[2], registries[2])
    assert registries[2].get("new") == adapter("new")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "good").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "root" / "file").write_text("")
    return tmp_path / "root"


async def test_only_folders_below_the_configured_one_are_loaded(root: Path) -> None:
    admin = AdapterAdmin(AdapterRegistry(), folder=str(root), read=read, try_on_workers=accept)
    wrong = [
        "",
        ".",
        "..",
        "../other",
        str(root.parent / "other"),
        "link",
        "/",
        "file",
        "gone",
        "good/../..",
        "a\0b",
    ]
    for path in [*wrong, "x" * 5000]:
        with pytest.raises(InvalidArgument) as caught:
            await admin.load(OPERATOR, "sql", path)
        assert caught.value.field == "lora_path"
        assert str(root) not in caught.value.message
    for name, path in (
        ("sql", "good"),
        ("absolute", str(root / "good")),
        ("long/way.round", "good/../good"),
    ):
        await admin.load(OPERATOR, name, path)
        assert admin.registry.get(name) == read(name, root / "good")


async def test_only_operators_and_only_where_it_is_allowed(root: Path) -> None:
    admin = AdapterAdmin(
        AdapterRegistry([adapter("a")]), folder=str(root), read=read, try_on_workers=accept
    )
    closed = AdapterAdmin(AdapterRegistry([adapter("a")]))
    for each, caller in ((admin, Caller(sees_all=False)), (closed, OPERATOR)):
        with pytest.raises(PermissionDenied):
            await each.load(caller, "sql", "good")
        with pytest.raises(PermissionDenied):
            await each.unload(caller, "a")


async def test_what_cannot_be_loaded_is_not_served(root: Path) -> None:
    found: list[TandemError] = []

    async def refuse(adapter: LoraAdapter) -> None:
        raise found[0]

    admin = AdapterAdmin(AdapterRegistry(), folder=str(root), read=read, try_on_workers=refuse)
    found.append(InvalidArgument("adapter_config.json: r: is 65", "lora_path"))
    with pytest.raises(InvalidArgument, match=r"lora_path: adapter_config\.json: r: is 65"):
        await admin.load(OPERATOR, "sql", "good")
    assert admin.registry.adapters == []
    for name in ("", "-", "a b", "x" * 129, "a\n"):
        with pytest.raises(InvalidArgument, match="lora_name"):
            await admin.load(OPERATOR, name, "good")
    with pytest.raises(InvalidArgument, match="lora_name: 'tiny' is served already"):
        await admin.load(OPERATOR, "tiny", "good", ["tiny"])
    with pytest.raises(NotFound):
        await admin.unload(OPERATOR, "sql")


async def test_a_name_is_loaded_once(root: Path) -> None:
    admin = AdapterAdmin(AdapterRegistry(), folder=str(root), read=read, try_on_workers=accept)
    results = await asyncio.gather(
        *(admin.load(OPERATOR, "sql", "good") for _ in range(5)), return_exceptions=True
    )
    assert sum(isinstance(result, InvalidArgument) for result in results) == 4
    await admin.unload(OPERATOR, "sql")
    await admin.load(OPERATOR, "sql", "good")
