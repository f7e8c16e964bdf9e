"""Checks the machine code of the Triton kernels for three kinds of GPUs, without one."""

import json
import os
import re
import subprocess
import sys
from typing import Final

import pytest

from tandem.tests.workers.model.compiled import SHAPES, SPILLING, WITH_PRODUCTS, CompiledKernel
from tandem.workers.model.attention import triton_backend
from tandem.workers.model.kernels.triton import (
    FP_FUSION,
    chunk,
    decode,
    elementwise,
    grouped,
    int4,
    linear,
    sampling,
)

SHARED_BYTES: Final = {80: 167_936, 90: 233_472, 100: 233_472}
"""By architecture: the shared memory of a multiprocessor."""

RESERVED_BYTES: Final = 1_024  # of shared memory, for each program
NUM_REGISTERS: Final = 65_536  # of a multiprocessor
MAX_WARPS: Final = 64
TENSOR_CORES: Final = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
"""By architecture: the instruction of its fastest products of bfloat16."""

CHUNKS_AND_LINEAR: Final = ("_chunk_kernel", "_grouped_kernel", "_linear_kernel")


@pytest.fixture(scope="module")
def compiled() -> list[CompiledKernel]:
    """Compiles in a process without the interpreter and with the default of Triton 3.10."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "0"
    command = [sys.executable, "-m", "tandem.tests.workers.model.compiled"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return [CompiledKernel(**json.loads(line)) for line in done.stdout.splitlines()]


def of_ours(compiled: list[CompiledKernel], *archs: int) -> list[CompiledKernel]:
    return [each for each in compiled if each.arch in archs and each.label != SPILLING]


def spilling(compiled: list[CompiledKernel]) -> list[CompiledKernel]:
    """Returns the kernels of tensor cores and none that spill registers to memory.

    Kernels with products of float32 use no tensor cores, need more registers, and only tests run
    them.
    """
    return [
        each
        for each in compiled
        if each.spills and not (each.dtype == "float32" and each.name in WITH_PRODUCTS)
    ]


def without_tensor_cores(
    compiled: list[CompiledKernel], names: tuple[str, ...] = CHUNKS_AND_LINEAR
) -> list[CompiledKernel]:
    """Returns the kernels of these names without the instruction of their architecture."""
    return [
        each
        for each in compiled
        if each.name in names
        and each.dtype == "bfloat16"
        and not each.opcodes[TENSOR_CORES[each.arch]]
    ]


def num_programs(kernel: CompiledKernel) -> int:
    """Returns how many programs of a kernel a multiprocessor runs at once."""
    registers = 32 * kernel.num_warps * (-(-kernel.registers // 8) * 8)  # given out in eights
    return min(
        SHARED_BYTES[kernel.arch] // (kernel.shared_bytes + RESERVED_BYTES),
        NUM_REGISTERS // registers,
        MAX_WARPS // kernel.num_warps,
    )


def test_all_compile(compiled: list[CompiledKernel]) -> None:
    modules = (chunk, decode, elementwise, grouped, int4, linear, sampling)
    names = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    for arch in SHAPES:
        assert {each.name for each in of_ours(compiled, arch)} == names
    assert {each.fuses for each in compiled} == {FP_FUSION}


def test_hopper_kernels_spill_no_registers(compiled: list[CompiledKernel]) -> None:
    assert spilling(of_ours(compiled, 90)) == []


def test_the_sampler_spills_no_registers_on_any_gpu(compiled: list[CompiledKernel]) -> None:
    samplers = [each for each in of_ours(compiled, *SHAPES) if each.name == "_sample_kernel"]
    assert {each.arch for each in samplers} == set(SHAPES)
    assert spilling(samplers) == []


def test_a_kernel_that_spills_is_found(compiled: list[CompiledKernel]) -> None:
    found = [each for each in spilling(compiled) if each.arch == 90]
    assert [(each.name, each.label) for each in found] == [("_chunk_kernel", SPILLING)]


def test_products_run_on_tensor_cores(compiled: list[CompiledKernel]) -> None:
    assert without_tensor_cores(of_ours(compiled, *SHAPES)) == []


def test_a_kernel_without_tensor_core_instructions_is_found(
    compiled: list[CompiledKernel],
) -> None:
    """The decode kernel's groups of heads are too small for HGMMA."""
    found = without_tensor_cores(of_ours(compiled, 90), ("_decode_kernel",))
    assert {each.name for each in found} == {"_decode_kernel"}


@pytest.mark.parametrize("arch", SHAPES)
def test_programs_fit_a_multiprocessor(compiled: list[CompiledKernel], arch: int) -> None:
    """As many decode programs as the backend starts, and one of each other kernel."""
    for each in of_ours(compiled, arch):
        head_dim = int(re.findall(r"head_dim=(\d+)|$", each.label)[0] or 0)
        started = (
            triton_backend.programs_per_processor(SHARED_BYTES[arch], head_dim)
            if each.name == "_decode_kernel"
            else 1
        )
        assert num_programs(each) >= started, each


def test_the_backend_starts_three_decode_programs_on_a_hopper_multiprocessor() -> None:
    started = [
        [triton_backend.programs_per_processor(SHARED_BYTES[arch], head_dim) for arch in SHAPES]
        for head_dim in (128, 256)
    ]
    assert started == [[2, 3, 3], [2, 2, 2]]
