"""Makes API keys for tests."""

from typing import Any

from tandem.router.auth.keys import ApiKey, hash_key


def api_key(secret: str, **fields: Any) -> ApiKey:
    """Returns the entry of a key; its name and tenant are the secret unless they are given."""
    return ApiKey(**({"name": secret, "tenant": secret, "sha256": hash_key(secret).hex()} | fields))


def bearer(secret: str) -> dict[str, str]:
    """Returns the header with a key."""
    return {"authorization": f"Bearer {secret}"}
