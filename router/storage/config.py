"""Configures the storage of responses, files and batches."""

from pydantic import BaseModel, Field

from ..auth.config import SECTION, AbsolutePath


class StorageConfig(BaseModel):
    """Configures stored responses, files and batches: where, how much and for how long."""

    model_config = SECTION

    # A folder for the database of this service alone; on a cluster, it must be on a disk that all
    # nodes share. None: kept in the memory of one process, and lost with it.
    folder: AbsolutePath | None = None
    # Of responses, files and finished batches.
    keep_seconds: float = Field(default=2_592_000.0, ge=60, le=31_536_000)
    # GiB of each tenant. At the bound its oldest responses are deleted, and new files are refused.
    tenant_gb: float = Field(default=0.25, ge=0.0001, le=4096)
    total_gb: float = Field(default=1.0, ge=0.0001, le=65_536)  # of all tenants
    # Lines of batches that each router answers at a time, after all other requests that wait.
    batch_concurrency: int = Field(default=16, ge=1, le=4096)
