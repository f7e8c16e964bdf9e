"""OLMo 2 (arXiv 2501.00656): Llama with norms after attention and MLP.

Queries and keys are also normalized, over all heads together.
"""

from collections.abc import Sequence

import torch

from ..attention.backend import StepAttention
from ..config import Fields, ModelConfig
from ..layers.linear import BuildOptions
from ..layers.norm import RMSNorm
from ..layers.rotary import CosSin, apply_rotary
from ..module import Parameter, WeightSlice
from ..states.steps import StepStates
from .family import DecoderLayer
from .llama import LlamaAttention, LlamaForCausalLM, LlamaMLP
from .parsing import parse_decoder_config


class Olmo2HeadNorm(RMSNorm):
    """Normalizes by the root mean square over the heads of all ranks."""

    def __init__(
        self,
        name: str,
        size: int,
        epsilon: float,
        build: BuildOptions,
        parts: Sequence[slice],
        copies: Sequence[int],
    ) -> None:
        """Takes `parts`: the slices of the weight [size] that this rank keeps, in order.

        `copies` has for each head of this rank the number of its copies on all ranks.
        """
        super().__init__(name, size, epsilon, build.dtype)
        self.weight = Parameter(
            *(WeightSlice(f"{name}.weight", (size,), (part,)) for part in parts), dtype=build.dtype
        )
        self._tp = build.tp
        self._size = size
        self._copies = copies

    def process_after_load(self) -> None:
        """Puts the shares of the heads on the device, because a copy in a step would wait."""
        super().process_after_load()
        self._shares = 1.0 / torch.tensor(self._copies, device=self.weight.data.device)

    def normalise(self, heads: torch.Tensor) -> torch.Tensor:
        """Maps this rank's heads [num_tokens, num_heads, head_dim] to the same shape."""
        num_tokens, num_heads, dim = heads.shape
        if self._tp.size == 1:
            return self(heads.view(num_tokens, num_heads * dim)).view(heads.shape)
        wide = heads.float()
        total = self._tp.all_reduce(
            (wide.square().sum(-1) * self._shares).sum(-1, keepdim=True)
        )  # [num_tokens, 1]
        scale = torch.rsqrt(total / self._size + self._epsilon)[:, :, None]
        return self.weight.data.view(num_heads, dim) * (wide * scale).to(heads.dtype)


class Olmo2Attention(LlamaAttention):
    """Computes Llama's attention over queries and keys normalized over all heads."""

    def __init__(self, config: ModelConfig, index: int, prefix: str, build: BuildOptions) -> None:
        super().__init__(config, index, prefix, build)
        layer = config.layers[index]
        tp = build.tp
        epsilon = config.norm_eps
        dim = layer.head_dim
        queries = tp.query_heads(layer)
        keys = tp.kv_heads(layer)
        query_part = [slice(queries.start * dim, queries.stop * dim)]
        key_parts = [slice(head * dim, (head + 1) * dim) for head in keys]
        self.q_norm = Olmo2HeadNorm(
            f"{prefix}.q_norm",
            layer.num_heads * dim,
            epsilon,
            build,
            query_part,
            [1] * (queries.stop - queries.start),
        )
        self.k_norm = Olmo2HeadNorm(
            f"{prefix}.k_norm",
            layer.num_kv_heads * dim,
            epsilon,
            build,
            key_parts,
            tp.kv_copies(layer),
        )

    def rotate(
        self, query_key: torch.Tensor, rotary: CosSin | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = torch.split(query_key, self._head_counts, dim=1)
        query = self.q_norm.normalise(query)
        key = self.k_norm.normalise(key)
        return (apply_rotary(query, rotary), apply_rotary(key, rotary)) if rotary else (query, key)


class Olmo2DecoderLayer(DecoderLayer):
    """Adds attention, then the MLP, each normalized afterwards."""

    def __init__(self, config: ModelConfig, index: int, build: BuildOptions) -> None:
        prefix = f"model.layers.{index}"
        size = config.hidden_size
        epsilon = config.norm_eps
        self.self_attn = Olmo2Attention(config, index, f"{prefix}.self_attn", build)
        self.post_attention_layernorm = RMSNorm(
            f"{prefix}.post_attention_layernorm", size, epsilon, build.dtype
        )
        self.mlp = LlamaMLP(config, f"{prefix}.mlp", build)
        self.post_feedforward_layernorm = RMSNorm(
            f"{prefix}.post_feedforward_layernorm", size, epsilon, build.dtype
        )

    def __call__(
        self,
        x: torch.Tensor,
        rotary: CosSin | None,
        attention: StepAttention,
        states: StepStates | None = None,
    ) -> torch.Tensor:
        x = self.post_attention_layernorm(self.self_attn(x, None, rotary, attention), x)
        return self.post_feedforward_layernorm(self.mlp(x, None), x)


class Olmo2ForCausalLM(LlamaForCausalLM):
    """Uses OLMo 2's layers in Llama's tree."""

    layer_type = Olmo2DecoderLayer


def parse_olmo2_config(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    return parse_decoder_config(
        fields, qkv_bias=bias, output_bias=bias, norm_eps=("rms_norm_eps", 1e-5)
    )
