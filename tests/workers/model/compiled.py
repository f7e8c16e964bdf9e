"""Compiles the Triton kernels for GPUs that are not here, and prints the resources that each needs.

`python -m tandem.tests.workers.model.compiled` prints a JSON line for each kernel. What Triton
compiled before comes from its cache. A launch only compiles, so no GPU is needed. The registers and
instructions come from cuobjdump, which is in Triton's package; what it prints is kept in the cache
as well.
"""

import functools
import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager

from tandem.tests.workers.model.test_gpu_kernels import Shape
from tandem.workers.model.kernels.triton import elementwise, grouped, int4, linear, sampling
from tandem.workers.model.kernels.triton.attention import Scales, Scoring
from tandem.workers.model.kernels.triton.chunk import ChunkWork, chunk_attention
from tandem.workers.model.kernels.triton.decode import DecodeWork, decode_attention
from tandem.workers.model.kv.gpu import split_scales

LLAMA: Final = Shape(num_heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
# All that a kernel may be asked for, at the largest head.
GEMMA: Final = Shape(
    num_heads=8,
    kv_heads=2,
    head_dim=256,
    dtype=torch.bfloat16,
    window=100,
    soft_cap=50.0,
    has_sinks=True,
)
# DeepSeek-V2 and V3 on one GPU, and on eight; Gemma 4's heads.
LATENT: Final = Shape(num_heads=128, kv_heads=1, head_dim=576, value_dim=512, dtype=torch.bfloat16)
FEW_LATENT: Final = replace(LATENT, num_heads=16)
WIDE: Final = Shape(num_heads=8, kv_heads=2, head_dim=512, dtype=torch.bfloat16, window=100)
UNEVEN: Final = Shape(num_heads=9, kv_heads=3, head_dim=64, dtype=torch.bfloat16, window=100)
EXACT: Final = Shape(num_heads=2, kv_heads=2, head_dim=64)
SHAPES: Final = {
    80: (LLAMA, GEMMA),
    90: (LLAMA, GEMMA, UNEVEN, EXACT),
    100: (LLAMA, GEMMA),
}
"""By compute capability, ten times: the shapes to compile for."""

ATTENTION_SHAPES: Final = (LATENT, FEW_LATENT, WIDE)
"""Shapes for which only attention is compiled, for capability 9.0."""

CACHES: Final = {80: torch.int8, 90: torch.uint8, 100: torch.uint8}
"""By compute capability, ten times: the item of a quantized cache; E4M3 needs 8.9."""

WITH_PRODUCTS: Final = ("_chunk_kernel", "_decode_kernel", "_grouped_kernel", "_linear_kernel")
"""The kernels whose instructions are listed, which takes a third of a second each."""

SPILLING: Final = "half of the warps"
"""The label of kernels of which one spills registers, for a test of the test."""

_CUOBJDUMP: Final = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_OPCODES: Final = ("HGMMA", "UTCHMMA", "HMMA", "STL", "LDL")


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """Holds the resources of a compiled kernel."""

    name: str
    label: str  # the shape, or SPILLING
    dtype: str
    arch: int  # compute capability, ten times
    fuses: bool  # rounds a product and a sum once
    num_warps: int
    shared_bytes: int
    registers: int  # of a thread
    stack_bytes: int  # of a thread; spilled registers are kept there
    opcodes: dict[str, int]  # how often an instruction occurs; empty if it was not listed

    @property
    def spills(self) -> bool:
        return self.stack_bytes > 0 or self.opcodes.get("STL", 0) + self.opcodes.get("LDL", 0) > 0


class AbsentGpu:
    """Stands for Triton's driver, which needs a GPU; a device's number is its capability."""

    def __init__(self) -> None:
        self.arch = 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """Compiles each kernel that a function of ours launches, once for each architecture."""

    def __init__(self) -> None:
        self.gpu = AbsentGpu()
        self.label = ""
        self.options: dict[str, object] = {}  # replace those of the launch
        self._seen: set[str] = set()
        self._inspectors = ThreadPoolExecutor(2)
        self._found: list[Future[CompiledKernel]] = []

    def launcher(self, kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        """Replaces `JITFunction.__getitem__`."""

        def compile_it(*args: object, **options: object) -> None:
            compiled = kernel.warmup(*args, grid=grid, **options | self.options)
            if compiled.hash in self._seen:
                return
            self._seen.add(compiled.hash)
            dtypes = [each.dtype for each in args if isinstance(each, torch.Tensor)]
            job = functools.partial(
                inspect, compiled, self.label, str(dtypes[0]).partition(".")[2], self.gpu.arch
            )
            self._found.append(self._inspectors.submit(job))

        return compile_it

    def results(self) -> list[CompiledKernel]:
        return [future.result(timeout=60) for future in self._found]


def inspect(compiled: Any, label: str, dtype: str, arch: int) -> CompiledKernel:
    """Reads the machine code of a kernel that Triton compiled."""
    metadata = compiled.metadata
    usage = _cuobjdump("-res-usage", compiled)
    listed = _cuobjdump("-sass", compiled) if compiled.name in WITH_PRODUCTS else ""
    fields = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    words = listed.replace(".", " ").split()
    return CompiledKernel(
        name=compiled.name,
        label=label,
        dtype=dtype,
        arch=arch,
        fuses=metadata.enable_fp_fusion,
        num_warps=metadata.num_warps,
        shared_bytes=metadata.shared,
        registers=int(fields["REG"]),
        stack_bytes=int(fields["STACK"]),
        opcodes={opcode: words.count(opcode) for opcode in _OPCODES} if listed else {},
    )


def _cuobjdump(option: str, compiled: Any) -> str:
    """Returns what cuobjdump prints of a kernel; keeps it beside the kernel in Triton's cache."""
    cache = get_cache_manager(compiled.hash)
    name = f"{compiled.name}{option}.txt"
    if (known := cache.get_file(name)) is not None:
        return Path(known).read_text()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(_CUOBJDUMP), option, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    cache.put(done.stdout, name, binary=False)
    return done.stdout


def compile_all() -> list[CompiledKernel]:
    """Compiles every kernel for every architecture."""
    compiler = Compiler()
    triton.runtime.driver.set_active(compiler.gpu)
    triton.JITFunction.__getitem__ = lambda kernel, grid: compiler.launcher(kernel, grid)
    for compiler.gpu.arch, shapes in SHAPES.items():
        for shape in shapes:
            compiler.label = str(shape)
            launch_attention(shape)
            # Experts in E4M3 are multiplied in bfloat16, and need 8.9.
            takes_e4m3 = compiler.gpu.arch >= 89 and shape.dtype is torch.bfloat16
            launch_others(shape, takes_e4m3=takes_e4m3)
        item = CACHES[compiler.gpu.arch]
        compiler.label = f"{LLAMA} over {item}"
        launch_attention(LLAMA, item)
    compiler.gpu.arch = 90
    for shape in ATTENTION_SHAPES:
        compiler.label = str(shape)
        launch_attention(shape)
    compiler.label = SPILLING
    compiler.options = {"num_warps": 4}
    launch_attention(LLAMA)
    return compiler.results()


def launch_attention(shape: Shape, item: torch.dtype | None = None) -> None:
    """Launches the kernels of paged attention, over a quantized cache if `item` is given."""
    zeros = functools.partial(torch.zeros, dtype=shape.dtype)
    query = zeros(4, shape.num_heads, shape.head_dim)
    keys, values = zeros(2, 4, shape.kv_heads, shape.block_size, shape.head_dim)
    if shape.value_dim is not None:
        values = keys[..., : shape.value_dim]
        row = zeros(4, shape.kv_heads, shape.head_dim)
        elementwise.store_kv(row, row, keys, None, torch.zeros(4, dtype=torch.int32))
    scales = None
    if item is not None:
        rows = torch.zeros(4, shape.kv_heads, shape.block_size, shape.head_dim + 2, dtype=item)
        keys = values = split_scales(rows, shape.head_dim)[0]
        scales = Scales(*[split_scales(rows, shape.head_dim)[1]] * 2)
        heads = zeros(4, shape.kv_heads, shape.head_dim)
        slots = torch.zeros(4, dtype=torch.int32)
        elementwise.store_kv(heads, heads, keys, values, slots, scales)
    out = zeros(4, shape.num_heads * shape.result_dim)
    array = torch.zeros(4, dtype=torch.int32)
    scoring = Scoring(
        window=shape.window,
        scale=shape.head_dim**-0.5,
        soft_cap=shape.soft_cap,
        sinks=torch.zeros(shape.num_heads) if shape.has_sinks else None,
    )
    partial = torch.zeros(4, shape.num_heads, shape.result_dim + 2)
    decodes = DecodeWork(**dict.fromkeys(DecodeWork._fields, array))
    decode_attention(query, keys, values, decodes, scoring, partial, out, 2, scales)
    chunks = ChunkWork(**dict.fromkeys(ChunkWork._fields, array))
    chunk_attention(query, keys, values, chunks, scoring, out, scales)


def launch_others(shape: Shape, *, takes_e4m3: bool) -> None:
    """Launches the kernels of norms, activations, rotation, KV cache, linear layers, sampling."""
    zeros = functools.partial(torch.zeros, dtype=shape.dtype)
    query = zeros(4, shape.num_heads, shape.head_dim)
    key = value = zeros(4, shape.kv_heads, shape.head_dim)
    keys, values = zeros(2, 4, shape.kv_heads, shape.block_size, shape.head_dim)
    out = zeros(4, shape.num_heads * shape.head_dim)
    table = zeros(4, 1, shape.head_dim)
    elementwise.rms_norm(out, zeros(out.shape[1]), 1e-5)
    elementwise.rms_norm(query, zeros(shape.head_dim), 1e-5)
    elementwise.rms_norm(out, zeros(out.shape[1]), 1e-5, 1.0, out)
    elementwise.silu_mul(out)
    elementwise.quantize_rows(out)
    elementwise.gelu_mul(out)
    elementwise.rotate(query, table, table)
    elementwise.store_kv(key, value, keys, values, torch.zeros(4, dtype=torch.int32))
    linear.linear(out, zeros(80, out.shape[1]), zeros(80), zeros(4, 80))
    order = torch.zeros(8, dtype=torch.int64)
    stack = zeros(5, 80, out.shape[1])
    for weight in (stack, stack.to(torch.float8_e4m3fn))[: 1 + takes_e4m3]:
        scales = None if weight is stack else torch.zeros(5, 80, 1)
        arguments = (weight, scales, zeros(5, 80), order, order[:5].int(), 2)
        grouped.grouped_linear(out, *arguments, from_tokens=True)
    grouped.combine(out, torch.zeros(2, 2))
    words = torch.zeros(2, 1, 32, 4, dtype=torch.int32)
    int4.restore(words, zeros(4, 16, 2))
    one = torch.zeros(1, 1, dtype=torch.int32)
    sampling.sample(zeros(4, 128_256), np.zeros(4, sampling.ROW), one, one.bool(), one)


if __name__ == "__main__":
    for found in compile_all():
        print(json.dumps(asdict(found)))
