"""The lower bounds of pyproject.toml that code depends on."""

import inspect
import re
import tomllib
from pathlib import Path

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tandem.proto import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc

ROOT = Path(__file__).parents[2]


def lower_bounds() -> dict[str, tuple[int, ...]]:
    """Returns the version from which each dependency is taken."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", each) for each in project["dependencies"]]
    return {each[1]: tuple(map(int, each[2].split("."))) for each in found if each}


@pytest.mark.parametrize("module", [inference_pb2_grpc, worker_pb2_grpc])
@pytest.mark.parametrize("package", ["grpcio", "grpcio-health-checking", "grpcio-reflection"])
def test_generated_code_runs_with_the_lowest_version_of_grpc(module: object, package: str) -> None:
    """It raises RuntimeError when it is imported with an older one."""
    needed = tuple(map(int, module.GRPC_GENERATED_VERSION.split(".")))  # type: ignore[attr-defined]
    assert lower_bounds()[package] >= needed


@pytest.mark.parametrize("module", [inference_pb2, worker_pb2])
def test_generated_code_runs_with_the_lowest_version_of_protobuf(module: object) -> None:
    """It raises VersionError when it is imported with an older one."""
    source = inspect.getsource(module)  # type: ignore[arg-type]
    found = re.search(r"Domain\.PUBLIC,\s+(\d+),\s+(\d+),\s+(\d+)", source)
    assert found is not None
    assert lower_bounds()["protobuf"] >= tuple(map(int, found.groups()))


def test_nixl_is_built_for_the_cuda_release_of_torch() -> None:
    """From 2.11 on, torch on PyPI is built for CUDA 13."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert lower_bounds()["torch"] >= (2, 11)
    (extra,) = project["optional-dependencies"]["nixl"]
    assert extra.startswith("nixl-cu13>=")
    pinned = re.findall(r"^nixl\S*==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned == ["nixl-cu13=="]


def test_uvicorn_has_what_connections_override() -> None:
    assert hasattr(HttpToolsProtocol, "_start_asgi_task")
    assert lower_bounds()["uvicorn"] >= (0, 45)  # the first that has it
