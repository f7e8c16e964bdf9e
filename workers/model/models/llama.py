"""Llama (arXiv 2302.13971), and the module tree that Mistral and Qwen share."""

from typing import Final

import torch

from ...engine.plan import OnLayers
from ..attention.backend import StepAttention
from ..config import Fields, ModelConfig, parse_decoder_config
from ..layers.linear import (
    BuildOptions,
    ColumnParallelLinear,
    ParallelLMHead,
    RowParallelLinear,
    VocabParallelEmbedding,
    qkv_outputs,
)
from ..layers.norm import RMSNorm
from ..layers.rotary import CosSin, RotaryEmbedding, apply_rotary
from ..module import Module
from .family import CausalLM

_NUM_LAYER_GROUPS: Final = 4  # parts of a step whose KV cache may be sent while the next part is computed


class LlamaAttention(Module):
    """Computes grouped-query attention (arXiv 2305.13245) with rotary positions."""

    def __init__(self, config: ModelConfig, index: int, prefix: str, build: BuildOptions) -> None:
        layer, hidden = config.layers[index], config.hidden_size
        local, heads, dim = build.tp.local_geometry(layer), build.tp.query_heads(layer), layer.head_dim
        self._index = index
        self._head_dim = dim
        self._head_counts = [local.num_heads, local.num_kv_heads]
        self.qkv_proj = ColumnParallelLinear(qkv_outputs(prefix, layer, build.tp), hidden, build, bias=config.qkv_bias)
        inputs = slice(heads.start * dim, heads.stop * dim)
        output = f"{prefix}.o_proj"
        self.o_proj = RowParallelLinear(output, hidden, layer.num_heads * dim, inputs, build, bias=config.output_bias)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, rotary: CosSin, attention: StepAttention
    ) -> torch.Tensor:
        """Maps x [num_tokens, hidden] to the same shape, added to `residual`."""
        heads = self.qkv_proj(x).view(x.shape[0], -1, self._head_dim)
        query_key, value = torch.split(heads, [sum(self._head_counts), self._head_counts[1]], dim=1)
        query, key = self.rotate(query_key, rotary)
        return self.o_proj(attention(self._index, query, key, value), residual)

    def rotate(self, query_key: torch.Tensor, rotary: CosSin) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates query_key [num_tokens, num_heads + num_kv_heads, head_dim]; returns queries and keys apart."""
        query, key = torch.split(apply_rotary(query_key, rotary), self._head_counts, dim=1)
        return query, key


class LlamaMLP(Module):
    """Computes down(silu(gate(x)) * up(x)), SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, prefix: str, build: BuildOptions) -> None:
        hidden, size, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        part = build.tp.part(size)
        outputs = [(f"{prefix}.{name}_proj", size, part) for name in ("gate", "up")]
        self.gate_up_proj = ColumnParallelLinear(outputs, hidden, build, bias=bias, gated=True)
        self.down_proj = RowParallelLinear(f"{prefix}.down_proj", hidden, size, part, build, bias=bias)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Maps x [num_tokens, hidden] to the same shape, added to `residual`."""
        return self.down_proj(self.gate_up_proj.method.apply_gated(x), residual)


class LlamaDecoderLayer(Module):
    """Adds attention, then the MLP, each of the normed hidden states."""

    def __init__(self, config: ModelConfig, index: int, attention: type[LlamaAttention], build: BuildOptions) -> None:
        prefix = f"model.layers.{index}"
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(f"{prefix}.input_layernorm", size, epsilon, build.dtype)
        self.self_attn = attention(config, index, f"{prefix}.self_attn", build)
        self.post_attention_layernorm = RMSNorm(f"{prefix}.post_attention_layernorm", size, epsilon, build.dtype)
        self.mlp = LlamaMLP(config, f"{prefix}.mlp", build)

    def __call__(self, x: torch.Tensor, rotary: CosSin, attention: StepAttention) -> torch.Tensor:
        """Maps x [num_tokens, hidden] to the same shape; x may be overwritten."""
        x = self.self_attn(self.input_layernorm(x), x, rotary, attention)
        return self.mlp(self.post_attention_layernorm(x), x)


class LlamaForCausalLM(CausalLM):
    """Computes embedding, decoder layers, norm and head."""

    def __init__(
        self, config: ModelConfig, build: BuildOptions, attention: type[LlamaAttention] = LlamaAttention
    ) -> None:
        """Raises ValueError if the heads cannot be split over the ranks."""
        self._config, self._dtype = config, build.dtype
        size = (config.vocab_size, config.hidden_size)
        self.embed_tokens = VocabParallelEmbedding("model.embed_tokens", *size, build)
        self.layers = [LlamaDecoderLayer(config, index, attention, build) for index in range(len(config.layers))]
        self.norm = RMSNorm("model.norm", config.hidden_size, config.rms_norm_eps, build.dtype)
        tied = self.embed_tokens.weight if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead("lm_head", size, build, tied)
        self._layers_a_group = -(-len(self.layers) // _NUM_LAYER_GROUPS)

    def process_after_load(self) -> None:
        """Makes a rotary embedding for each head size of the layers."""
        config, device = self._config, self.embed_tokens.weight.data.device
        positions = config.max_position_embeddings
        self._rotary = {
            dim: RotaryEmbedding(config.rope, dim, max_positions=positions, dtype=self._dtype, device=device)
            for dim in {layer.head_dim for layer in config.layers}
        }
        self._head_dims = [layer.head_dim for layer in config.layers]

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        on_layers: OnLayers | None = None,
    ) -> torch.Tensor:
        """See `CausalLM.__call__`."""
        x = self.embed_tokens(token_ids)  # [num_tokens, hidden]
        rotary = {dim: embedding(positions) for dim, embedding in self._rotary.items()}
        for index, layer in enumerate(self.layers):
            if on_layers and index and index % self._layers_a_group == 0:
                on_layers(index)
            x = layer(x, rotary[self._head_dims[index]], attention)
        return x

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `CausalLM.compute_logits`."""
        return self.lm_head(self.norm(hidden))


def parse_llama_config(fields: Fields) -> ModelConfig:
    """See `ModelFamily.parse_config`."""
    bias, mlp_bias = fields.boolean("attention_bias", False), fields.boolean("mlp_bias", False)
    return parse_decoder_config(fields, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
