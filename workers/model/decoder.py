"""The decoder: Llama, Mistral, Qwen2, Qwen3 and their kin, over a flat batch of tokens of many sequences."""

from dataclasses import dataclass
from typing import Final

import torch

from ..engine.plan import OnLayers
from .attention.torch_attention import StepAttention
from .config import ModelConfig
from .layers.linear import GatedMlp, Linear, RmsNorm
from .layers.rotary import rotate
from .parallel import Shard
from .weights import Weights

_LAYER_GROUPS: Final = 4
"""Parts of a step whose KV cache may leave while the next part is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """What one step computes, and all that its layers share."""

    token_ids: torch.Tensor  # [num_tokens]
    cos: torch.Tensor  # [num_tokens, 1, head_dim]
    sin: torch.Tensor  # [num_tokens, 1, head_dim], signed as `rotate` takes it
    attention: StepAttention
    sampled_rows: torch.Tensor | None  # [num_sampled], the tokens whose logits are wanted; None is all


class Decoder:
    """Embedding, layers, norm, head."""

    def __init__(self, config: ModelConfig, weights: Weights, shard: Shard | None = None) -> None:
        """`config` is that of the whole model; `shard` is the part of it to load, else all."""
        self._shard = shard = shard or Shard(config)
        rows = slice(shard.vocab.start, shard.vocab.stop)
        self._embedding = weights.take("model.embed_tokens.weight", rows)  # [len(vocab), hidden]
        self._layers = [_Layer(shard, weights, index) for index in range(config.num_layers)]
        self._layers_at_once = -(-len(self._layers) // _LAYER_GROUPS)
        self._norm = RmsNorm(weights.take("model.norm.weight"), config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self._head = Linear(self._embedding) if tied else Linear.load(weights, ("lm_head", rows))

    def __call__(self, batch: StepBatch, on_layers: OnLayers | None = None) -> torch.Tensor:
        """Returns the logits of the sampled rows: [num_sampled, vocab_size]."""
        x = self.hidden(batch, on_layers)
        return self.logits(x if batch.sampled_rows is None else x[batch.sampled_rows])

    def hidden(self, batch: StepBatch, on_layers: OnLayers | None = None) -> torch.Tensor:
        """What the layers make of all tokens: [num_tokens, hidden]."""
        x = self._shard.embed(self._embedding, batch.token_ids)  # [num_tokens, hidden]
        for number, layer in enumerate(self._layers):
            if on_layers and number and number % self._layers_at_once == 0:
                on_layers(number)
            x = layer(x, batch)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [num_rows, hidden] of `hidden` to [num_rows, vocab_size]."""
        return self._shard.join(self._head(self._norm(x)))


class _Layer:
    def __init__(self, shard: Shard, weights: Weights, index: int) -> None:
        prefix, config = f"model.layers.{index}", shard.config
        self._attention_norm = RmsNorm(weights.take(f"{prefix}.input_layernorm.weight"), config.rms_norm_eps)
        self._attention = _Attention(shard, weights, f"{prefix}.self_attn", index)
        self._mlp_norm = RmsNorm(weights.take(f"{prefix}.post_attention_layernorm.weight"), config.rms_norm_eps)
        self._mlp = GatedMlp(weights, f"{prefix}.mlp", shard)

    def __call__(self, x: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        x = self._attention(self._attention_norm(x), x, batch)
        return self._mlp(self._mlp_norm(x), x)


class _Attention:
    def __init__(self, shard: Shard, weights: Weights, prefix: str, index: int) -> None:
        config = shard.config
        self._shard = shard
        self._index = index
        self._head_counts = [config.num_heads, config.num_kv_heads]
        self._head_dim = config.head_dim
        kv = [(f"{prefix}.{name}", rows) for name in ("k_proj", "v_proj") for rows in shard.kv_rows]
        self._qkv = Linear.load(weights, (f"{prefix}.q_proj", shard.query_rows), *kv)
        self._output = Linear.load_summand(weights, f"{prefix}.o_proj", shard, shard.query_rows)
        self._qk_norms = None
        if config.qk_norm:
            names = (f"{prefix}.q_norm.weight", f"{prefix}.k_norm.weight")
            self._qk_norms = [RmsNorm(weights.take(name), config.rms_norm_eps) for name in names]

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """[num_tokens, hidden] to the same, added to `residual`."""
        heads = self._qkv(x).view(x.shape[0], -1, self._head_dim)
        rotated, value = torch.split(heads, [sum(self._head_counts), self._head_counts[1]], dim=1)
        if self._qk_norms:
            parts = zip(self._qk_norms, torch.split(rotated, self._head_counts, dim=1), strict=True)
            query, key = (rotate(norm(part), batch.cos, batch.sin) for norm, part in parts)
        else:
            query, key = torch.split(rotate(rotated, batch.cos, batch.sin), self._head_counts, dim=1)
        mixed = batch.attention(self._index, query, key, value)  # [num_tokens, num_heads * head_dim]
        return self._shard.add_up(self._output(mixed, self._shard.residual(residual)))
