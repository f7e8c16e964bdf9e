"""Llama (arXiv 2302.13971) and Aquila: the module tree that most other families modify."""

from collections.abc import Callable
from typing import ClassVar, Final

import torch

from ...engine.plan import OnLayers
from ..attention.backend import PLAIN, StepAttention
from ..config import Fields, ModelConfig
from ..layers.linear import (
    BuildOptions,
    ColumnParallelLinear,
    ParallelLMHead,
    RowParallelLinear,
    VocabParallelEmbedding,
    gate_up_outputs,
    qkv_outputs,
)
from ..layers.norm import LayerNorm, RMSNorm
from ..layers.rotary import CosSin, RotaryEmbedding, apply_rotary, rotated_order
from ..layers.rows import EmbeddingRows
from ..module import Module
from ..states.steps import StepStates
from .family import CausalLM, DecoderLayer
from .parsing import parse_decoder_config

# Parts of a step: the KV cache of one part may be sent while the next part is computed.
_NUM_LAYER_GROUPS: Final = 4


FeedForward = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Maps x [num_tokens, hidden] to the same shape and adds the residual."""


class LlamaAttention(Module):
    """Computes grouped-query attention (arXiv 2305.13245) with rotary positions."""

    fused: ClassVar[bool] = False  # whether the checkpoint has one qkv_proj
    gated: ClassVar[bool] = False  # whether q_proj also has gates; see `qkv_outputs`
    output_name: ClassVar[str] = "o_proj"

    def __init__(self, config: ModelConfig, index: int, prefix: str, build: BuildOptions) -> None:
        layer = config.layers[index]
        hidden = config.hidden_size
        local = build.tp.local_geometry(layer)
        heads = build.tp.query_heads(layer)
        dim = layer.head_dim
        self._index = index
        self._head_dim = dim
        self._head_counts = [local.num_heads, local.num_kv_heads]
        self._options = PLAIN
        order = rotated_order(config.ropes[index], dim)
        outputs = qkv_outputs(prefix, layer, build.tp, order, fused=self.fused, gated=self.gated)
        self.qkv_proj = ColumnParallelLinear(outputs, hidden, build, bias=config.qkv_bias)
        inputs = slice(heads.start * dim, heads.stop * dim)
        output = f"{prefix}.{self.output_name}"
        self.o_proj = RowParallelLinear(
            output, hidden, layer.num_heads * dim, inputs, build, bias=config.output_bias
        )

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotary: CosSin | None,
        attention: StepAttention,
    ) -> torch.Tensor:
        """Maps x [num_tokens, hidden] to the same shape, added to `residual`."""
        heads = self.qkv_proj(x).view(x.shape[0], -1, self._head_dim)
        query_key, value = torch.split(heads, [sum(self._head_counts), self._head_counts[1]], dim=1)
        query, key = self.rotate(query_key, rotary)
        return self.o_proj(attention(self._index, query, key, value, self._options), residual)

    def rotate(
        self, query_key: torch.Tensor, rotary: CosSin | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates query_key [num_tokens, num_heads + num_kv_heads, head_dim] and splits it."""
        rotated = apply_rotary(query_key, rotary) if rotary else query_key
        query, key = torch.split(rotated, self._head_counts, dim=1)
        return query, key


class LlamaMLP(Module):
    """Computes down(activation(gate(x)) * up(x)), SwiGLU or GeGLU (arXiv 2002.05202)."""

    gate_up_names: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")  # or one for both
    down_name: ClassVar[str] = "down_proj"

    def __init__(self, config: ModelConfig, prefix: str, build: BuildOptions) -> None:
        hidden = config.hidden_size
        size = config.intermediate_size
        bias = config.mlp_bias
        part = build.tp.part(size)
        outputs = gate_up_outputs(prefix, size, part, self.gate_up_names)
        self._activation = config.activation
        self.gate_up_proj = ColumnParallelLinear(outputs, hidden, build, bias=bias, gated=True)
        self.down_proj = RowParallelLinear(
            f"{prefix}.{self.down_name}", hidden, size, part, build, bias=bias
        )

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Maps x [num_tokens, hidden] to the same shape, added to `residual`."""
        return self.down_proj(self.gate_up_proj.gated(x, self._activation), residual)


class LlamaDecoderLayer(DecoderLayer):
    """Adds attention, then the MLP, each applied to normalized hidden states."""

    attention_type: ClassVar[type[LlamaAttention]] = LlamaAttention
    mlp_type: ClassVar[type[LlamaMLP]] = LlamaMLP

    def __init__(self, config: ModelConfig, index: int, build: BuildOptions) -> None:
        prefix = f"model.layers.{index}"
        size = config.hidden_size
        epsilon = config.norm_eps
        self.input_layernorm = RMSNorm(f"{prefix}.input_layernorm", size, epsilon, build.dtype)
        self.self_attn = self.attention_type(config, index, f"{prefix}.self_attn", build)
        self.post_attention_layernorm = RMSNorm(
            f"{prefix}.post_attention_layernorm", size, epsilon, build.dtype
        )
        self.mlp: FeedForward = self.mlp_type(config, f"{prefix}.mlp", build)

    def __call__(
        self,
        x: torch.Tensor,
        rotary: CosSin | None,
        attention: StepAttention,
        states: StepStates | None = None,
    ) -> torch.Tensor:
        x = self.self_attn(self.input_layernorm(x), x, rotary, attention)
        return self.mlp(self.post_attention_layernorm(x), x)


class LlamaForCausalLM(CausalLM):
    """Computes embedding, decoder layers, norm and head."""

    layer_type: ClassVar[type[DecoderLayer]] = LlamaDecoderLayer
    embedding_name: ClassVar[str] = "model.embed_tokens"
    norm_name: ClassVar[str] = "model.norm"
    norm_offset: ClassVar[float] = 0.0  # added to the weight of the last norm

    def __init__(self, config: ModelConfig, build: BuildOptions) -> None:
        """Raises ValueError if the heads cannot be split over the ranks."""
        self._config = config
        self._dtype = build.dtype
        self.lora = build.lora
        size = (config.vocab_size, config.hidden_size)
        self.embed_tokens = VocabParallelEmbedding(self.embedding_name, *size, build)
        self.layers = [self.layer_type(config, index, build) for index in range(len(config.layers))]
        self.norm: RMSNorm | LayerNorm = RMSNorm(
            self.norm_name,
            config.hidden_size,
            config.norm_eps,
            build.dtype,
            offset=self.norm_offset,
        )
        tied = self.embed_tokens.weight if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead("lm_head", size, build, tied)
        self._layers_a_group = -(-len(self.layers) // _NUM_LAYER_GROUPS)

    def process_after_load(self) -> None:
        """Creates one rotary embedding per distinct head size and scaling."""
        config = self._config
        device = self.embed_tokens.weight.data.device
        positions = config.context_tokens
        kinds = [
            (rope, layer.head_dim) for rope, layer in zip(config.ropes, config.layers, strict=True)
        ]
        distinct = list(dict.fromkeys(kinds))
        self._rotary = [
            RotaryEmbedding(rope, dim, max_positions=positions, dtype=self._dtype, device=device)
            if rope
            else None
            for rope, dim in distinct
        ]
        self._rotary_of_layers = [distinct.index(kind) for kind in kinds]

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        on_layers: OnLayers | None = None,
        rows: EmbeddingRows | None = None,
        states: StepStates | None = None,
    ) -> torch.Tensor:
        x = self.embed(token_ids, rows)  # [num_tokens, hidden]
        rotary = [embedding(positions) if embedding else None for embedding in self._rotary]
        for index, layer in enumerate(self.layers):
            if on_layers and index and index % self._layers_a_group == 0:
                on_layers(index)
            x = layer(x, rotary[self._rotary_of_layers[index]], attention, states)
        return x

    def embed(self, token_ids: torch.Tensor, rows: EmbeddingRows | None) -> torch.Tensor:
        """Maps token_ids [num_tokens] to the input of the first layer, [num_tokens, hidden].

        `rows` replace the embeddings of some tokens.
        """
        embeddings = self.embed_tokens(token_ids)
        return embeddings if rows is None else rows.put(embeddings)

    def normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(hidden))


def parse_llama_config(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    mlp_bias = fields.boolean("mlp_bias", False)
    return parse_decoder_config(fields, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
