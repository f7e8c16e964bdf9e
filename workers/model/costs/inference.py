"""Computes the FLOPs and bytes of prefill and decode: the arithmetic of a model's inference.

Pure arithmetic; imports no torch. A product of a matrix and a vector takes two FLOPs for each
element of the matrix. Only matrix products count, as in "Transformer Inference Arithmetic" (Chen,
2022): norms, activations, softmax and sampling add less than a percent. A latent layer (DeepSeek's
MLA, arXiv 2405.04434) counts as this engine computes it: each query attends to the latent rows, and
no key or value is expanded.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ...kv_cache.layout import ITEM_BYTES, KvLayout, LayerGeometry, head_bytes
from ..config import ModelConfig
from ..footprint import kv_layout


class Work(NamedTuple):
    """Holds the least bytes that a step moves, and the FLOPs that it computes."""

    num_bytes: int  # of weights, KV cache and states
    flops: int

    @property
    def intensity(self) -> float:
        """Returns the arithmetic intensity: FLOPs for each byte."""
        return self.flops / self.num_bytes if self.num_bytes else 0.0


def total(works: Iterable[Work]) -> Work:
    """Returns the sum of several steps."""
    listed = list(works)
    return Work(sum(each.num_bytes for each in listed), sum(each.flops for each in listed))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Holds the parameters of a whole model, and the bytes that they take."""

    parameters: int  # all
    linear: int  # of the layers' matrices, all experts included
    head: int  # of the matrix that maps a token's last hidden state to logits
    experts: int = 0  # the part of `linear` in routed experts
    num_experts: int = 0  # of each layer that has any
    num_chosen: int = 0  # of these, by each token
    weight_bytes: int  # as the engine keeps them, quantized or not
    plain_bytes: int  # of the same weights without quantization

    @property
    def chosen_share(self) -> float:
        """Returns the share of a layer's experts that a token chooses."""
        return self.num_chosen / self.num_experts if self.num_experts else 1.0

    @property
    def active(self) -> int:
        """Returns the parameters that take part in one token's step."""
        return self.parameters - int(self.experts * (1 - self.chosen_share))


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceCost:
    """Computes the work of a model's steps on one device. Made by `inference_cost`."""

    config: ModelConfig
    sizes: ModelSizes
    layout: KvLayout

    @property
    def kv_bytes_per_token(self) -> int:
        """Returns the bytes of KV cache of one token in all layers."""
        return self.layout.bytes_per_token

    @property
    def kv_bytes_without_sharing(self) -> int:
        """Returns the same if every query head had keys and values of its own (no GQA, no MLA).

        Latent layers count with the head dimension of their queries for keys and values.
        """
        return sum(
            2
            * layer.num_heads
            * head_bytes(_query_dim(self.config, layer), self.layout.dtype, self.layout.cache_dtype)
            for layer in self.config.layers
            if layer.num_kv_heads
        )

    @property
    def expert_bytes(self) -> int:
        """Returns the bytes of the weights of all routed experts."""
        return self._bytes_of(self.sizes.experts)

    def kv_bytes(self, num_tokens: int) -> int:
        """Returns the KV cache and the states of a sequence; a window keeps only its tokens."""
        kept = sum(
            group.token_bytes * min(num_tokens, group.part.window or num_tokens)
            for group in self.layout.token_groups
        )
        return kept + self.layout.bytes_per_state

    def prefill(self, num_tokens: int, num_cached: int = 0) -> Work:
        """Returns the work of the tokens of a prompt after the first `num_cached`.

        The weights are read once, and the head runs once. The KV cache of the new tokens is
        written; the cached tokens are read.
        """
        new = num_tokens - num_cached
        attention = sum(
            pair_flops(layer)
            * (_causal_pairs(num_tokens, layer.window) - _causal_pairs(num_cached, layer.window))
            for layer in self.config.layers
        )
        flops = 2 * new * self._used_linear + 2 * self.sizes.head + attention
        cache = int(self._read_bytes(num_cached)) + new * self.kv_bytes_per_token
        return Work(self._weight_bytes(new) + cache + self.layout.bytes_per_state, flops)

    def decode(self, context: float, batch: int = 1) -> Work:
        """Returns the work of a step in which `batch` sequences attend to `context` positions.

        A step reads the experts that are chosen if each token chooses at random. It reads the
        states, and writes them to other slots.
        """
        attention = sum(
            pair_flops(layer) * min(context, layer.window or context)
            for layer in self.config.layers
        )
        states = 2 * self.layout.bytes_per_state
        flops = 2 * (self._used_linear + self.sizes.head) + attention
        num_bytes = self._weight_bytes(batch) + batch * (self._read_bytes(context) + states)
        return Work(int(num_bytes), int(batch * flops))

    def decodes(self, num_prompt: int, num_output: int, batch: int = 1) -> list[Work]:
        """Returns the work of the steps after the first token, which the prefill computes.

        In each step `batch` sequences of the same lengths decode.
        """
        return [self.decode(num_prompt + number, batch) for number in range(1, num_output)]

    def without_cache(self, num_prompt: int, num_output: int) -> list[Work]:
        """Returns the work of each token if nothing were kept: a prefill of all tokens before it.

        The sum of the tokens grows with the square of `num_output`.
        """
        return [self.prefill(num_prompt + number) for number in range(num_output)]

    @property
    def _used_linear(self) -> int:
        """Returns the parameters of the layers that one token is multiplied by."""
        sizes = self.sizes
        return sizes.linear - int(sizes.experts * (1 - sizes.chosen_share))

    def _weight_bytes(self, num_tokens: int) -> int:
        """Returns the bytes of the weights that `num_tokens` read: all, but not every expert."""
        sizes = self.sizes
        unread = int(sizes.experts * (1 - sizes.chosen_share) ** num_tokens)
        return self._bytes_of(sizes.linear + sizes.head - unread)

    def _bytes_of(self, params: int) -> int:
        """Returns the bytes of a part of the weights; quantization saves the same share of each."""
        sizes = self.sizes
        saved = (sizes.plain_bytes - sizes.weight_bytes) * params // (sizes.linear + sizes.head)
        return params * ITEM_BYTES[self.layout.dtype] - saved

    def _read_bytes(self, context: float) -> float:
        """Returns the bytes of the KV cache that a query at the end of `context` tokens reads."""
        return sum(
            (2 if layer.value_dim is None else 1)
            * layer.num_kv_heads
            * head_bytes(layer.head_dim, self.layout.dtype, self.layout.cache_dtype)
            * min(context, layer.window or context)
            for layer in self.config.layers
        )


def inference_cost(
    config: ModelConfig, sizes: ModelSizes, dtype: str, cache_dtype: str = "auto"
) -> InferenceCost:
    """Returns the costs of a model in a dtype. Raises ValueError as `check_cache_dtype`."""
    return InferenceCost(config=config, sizes=sizes, layout=kv_layout(config, dtype, cache_dtype))


def pair_flops(layer: LayerGeometry) -> int:
    """Returns the FLOPs of all heads' attention of one token to one key."""
    if not layer.num_kv_heads:
        return 0
    return 2 * layer.num_heads * (layer.head_dim + (layer.value_dim or layer.head_dim))


def _query_dim(config: ModelConfig, layer: LayerGeometry) -> int:
    """Returns the size of a head before latent attention compresses it."""
    fields = config.transformers or {}
    if layer.value_dim is None or not isinstance(fields.get("v_head_dim"), int):
        return layer.head_dim
    sizes = (fields.get("qk_nope_head_dim"), fields.get("qk_rope_head_dim"))
    key = sum(size for size in sizes if isinstance(size, int))
    return (key + int(fields["v_head_dim"])) // 2


def _causal_pairs(num_tokens: int, window: int | None) -> int:
    """Returns the number of (query, key) pairs that a causal layer computes."""
    seen = min(num_tokens, window or num_tokens)
    return seen * (seen + 1) // 2 + (num_tokens - seen) * seen
