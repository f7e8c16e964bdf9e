"""What a worker is told of a request."""

from tandem.proto.hashing import hash_tenant
from tandem.router.dispatch.submit import make_submit
from tandem.tests.router.pools import request


def test_workers_can_tell_tenants_apart_and_learn_no_name() -> None:
    told = {}
    for tenant in ("", "ada", "bob"):
        asked = request((1, 2), tenant=tenant)
        told[tenant] = make_submit(asked, asked, 1, 0, 0).tenant
    assert told == {"": b"", "ada": hash_tenant("ada"), "bob": hash_tenant("bob")}
    assert len(set(told.values())) == 3
    assert all(tenant.encode() not in sent for tenant, sent in told.items() if tenant)
