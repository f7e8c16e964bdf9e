"""Measures the attention kernels beside torch's, and with other tiles."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from tandem.tests.bench.gpu.bench import Bench
from tandem.workers.kv_cache.layout import KvLayout
from tandem.workers.model.attention.backend import SequenceSpan
from tandem.workers.model.attention.triton_backend import TritonAttentionBackend
from tandem.workers.model.kernels.triton import chunk, decode
from tandem.workers.model.kv.store import PagedKv

_TILES: Final = [
    {"KEYS": keys, "num_stages": stages, "num_warps": warps}
    for keys in (32, 64, 128)
    for stages in (2, 3, 4)
    for warps in (4, 8)
]
# Of outputs up to about 4, whose last bit in bfloat16 is worth 0.016. A wrong mask gives 1 or more.
_MAX_DIFFERENCE: Final = 0.2
_BACKENDS: Final = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)


class Layer:
    """Holds one layer's paged cache of random numbers, and the tokens of a step."""

    def __init__(self, bench: Bench, lengths: list[int], num_new: int) -> None:
        """Takes sequences of `lengths` tokens, of which the last `num_new` are of the step."""
        layer = bench.config.layers[0]
        dtype = torch.bfloat16 if bench.is_gpu else torch.float32
        blocks = [-(-length // 16) for length in lengths]
        layout = KvLayout(layers=(layer,), dtype=str(dtype).partition(".")[2], model="")
        device = bench.torch_device
        self.kv = PagedKv(layout, num_blocks=sum(blocks), block_size=16, device=device)
        self.kv.data.normal_()
        self.backend = TritonAttentionBackend(self.kv, [layer])
        first = [sum(blocks[:index]) for index in range(len(blocks))]
        self.spans = [
            SequenceSpan(
                tables=[range(begin, begin + count)], start=length - num_new, num_tokens=num_new
            )
            for begin, count, length in zip(first, blocks, lengths, strict=True)
        ]
        num_tokens = num_new * len(lengths)
        size = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        self.query, self.key, self.value = (
            torch.randn(num_tokens, heads, layer.head_dim, device=device, dtype=dtype)
            for heads in size
        )

    def attend(self) -> torch.Tensor:
        """Returns [num_tokens, num_heads * head_dim]."""
        return self.step(0, self.query, self.key, self.value)

    def plan(self) -> None:
        """Computes the index arrays of the step, outside of the measured time."""
        self.step = self.backend.plan(self.spans)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys and values of a single sequence, [1, num_kv_heads, length, head_dim]."""
        span = self.spans[0]
        length = span.start + span.num_tokens
        keys, values = self.kv.layers[0]
        return tuple(  # type: ignore[return-value]
            part.transpose(0, 1).flatten(1, 2)[None, :, :length] for part in (keys, values)
        )


@torch.inference_mode()
def measure(bench: Bench) -> None:
    """Measures chunks, then decodes."""
    num_new = bench.pick(2048, 6)
    for length in bench.pick((2048, 8192, 32_768), (6, 40)):
        _chunk(bench, num_new, length)
    long = bench.pick(8192, 40)
    layer = Layer(bench, [long], num_new)
    layer.plan()
    for options in _TILES[:: bench.pick(1, len(_TILES) - 1)]:
        with _launched_with(chunk, "_chunk_kernel", options):
            name = f"chunk of {num_new} in {long}, other tile"
            bench.attempt(name, layer.attend, **options)
    lengths = [bench.pick(1024, 20)] * bench.pick(32, 2)
    layer = Layer(bench, lengths, 1)
    for split in bench.pick((128, 256, 512), (256,)):
        for programs in bench.pick((2, 3, 4), (3,)):
            kv_heads = bench.config.layers[0].num_kv_heads
            layer.backend.num_programs = dict.fromkeys(
                layer.backend.num_programs, max(1, bench.pick(132, 1) * programs // kv_heads)
            )
            with mock.patch.object(decode, "SPLIT_TOKENS", split):
                layer.plan()
                bench.attempt(
                    f"{len(lengths)} decodes of {lengths[0]}",
                    layer.attend,
                    split=split,
                    programs_per_processor=programs,
                )


def _chunk(bench: Bench, num_new: int, length: int) -> None:
    layer = Layer(bench, [length], num_new)
    layer.plan()
    name = f"chunk of {num_new} in {length}"
    bench.time(f"{name}: ours, paged", layer.attend)
    ours = layer.attend()
    keys, values = layer.dense()
    query = layer.query.transpose(0, 1)[None]  # [1, num_heads, num_new, head_dim]

    def peer() -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=causal_lower_right(num_new, length),
            enable_gqa=True,
        )

    for backend in _BACKENDS if bench.is_gpu else (SDPBackend.MATH,):
        with sdpa_kernel(backend):
            bench.attempt(f"{name}: torch, dense, {backend.name}", peer)
    with sdpa_kernel(SDPBackend.MATH):
        theirs = peer()[0].transpose(0, 1).flatten(1)
    difference = float((ours - theirs).abs().max())
    bench.row(f"{name}: largest difference", value=difference)
    if not difference <= _MAX_DIFFERENCE:  # also NaN
        raise RuntimeError(f"{name}: ours differs from torch's by {difference}")


@contextmanager
def _launched_with(module: Any, name: str, options: dict[str, int]) -> Iterator[None]:
    """Replaces options of a kernel's launches."""
    kernel = getattr(module, name)

    class Changed:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **given: kernel[grid](*args, **given | options)

    with mock.patch.object(module, name, Changed()):
        yield
