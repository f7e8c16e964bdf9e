"""Configures the watermark of generated texts."""

from typing import Annotated, Final, Self

from pydantic import BaseModel, Field, Strict, model_validator

from ...proto.limits import MAX_WATERMARK_CONTEXT, MAX_WATERMARK_DELTA, WATERMARK_GAMMA
from ..auth.config import SECTION, TENANT, AbsolutePath
from ..fields import matching

EVERYONE: Final = "*"

_Tenant = Annotated[
    str,
    matching(rf"\*|{TENANT}", "the name of a tenant, or * for all"),
]


class WatermarkConfig(BaseModel):
    """Configures the watermark; without a key no request can have one."""

    model_config = SECTION

    # Written by `tandem watermark key`; at this path on every node of a router.
    key_file: AbsolutePath | None = None
    # The share of green tokens in the vocabulary.
    gamma: float = Field(default=0.25, ge=WATERMARK_GAMMA[0], le=WATERMARK_GAMMA[1])
    # Added to the logits of green tokens.
    delta: float = Field(default=2.0, gt=0, le=MAX_WATERMARK_DELTA)
    # The number of previous tokens that choose the green tokens of the next one.
    context_width: int = Field(default=2, ge=1, le=MAX_WATERMARK_CONTEXT)
    # Tenants whose completions always have the watermark; "*": all callers.
    tenants: Annotated[tuple[_Tenant, ...], Field(max_length=10_000), Strict(False)] = ()

    @model_validator(mode="after")
    def _tenants_need_a_key(self) -> Self:
        if self.tenants and self.key_file is None:
            raise ValueError("watermark.tenants: needs watermark.key_file")
        return self
