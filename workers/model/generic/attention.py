"""Defines the attention function that transformers' modules call, over a paged KV cache.

It is registered in transformers' `AttentionInterface`. Transformers creates no mask for a name that
it does not know: all sequences of a step are in one row of a batch, and only the step knows their
limits. The mixers of layers with states compute in the same step; see `states`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface

from ...engine.plan import OnLayers
from ...kv_cache.layout import LayerGeometry
from ..attention.backend import AttentionOptions, StepAttention
from ..parallel import TensorParallel
from ..states.steps import StepStates
from .latent import LatentHeads
from .sparse import CausalMask, without_mask
from .states.mixers import ConvCall, MixerCall, mix_by
from .states.parts import Mixer

ATTENTION: Final = "tandem"
# The KV cache of one group of layers may be sent while the next group is computed.
_NUM_LAYER_GROUPS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedLayer:
    """Describes what one layer caches, and its module with the attention or the mixer."""

    module: nn.Module
    geometry: LayerGeometry


Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value.

The query is [1, num_heads, num_tokens, head_dim], key and value are [1, num_kv_heads, num_tokens,
head_dim].
"""

_Attend = Callable[[nn.Module, Heads, torch.Tensor | None, dict[str, Any]], torch.Tensor]
"""Maps a module's heads, mask and options to [1, num_tokens, num_heads, head_dim]."""

_handler: ContextVar[_Attend] = ContextVar("attention")


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | CausalMask | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Implements transformers' interface of attention functions, which also returns weights."""
    mask = without_mask(attention_mask)
    return _handler.get()(module, (query, key, value), mask, options), None


AttentionInterface.register(ATTENTION, _attend)


@contextmanager
def attend_by(handler: _Attend) -> Iterator[None]:
    """Makes the modules that this thread calls attend by `handler`."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


class PagedLayers:
    """Attends, and mixes by states, in the layers of one model over a rank's caches."""

    def __init__(self, layers: Sequence[TracedLayer], tp: TensorParallel) -> None:
        self._tp = tp
        self._layers = {id(layer.module): (index, layer) for index, layer in enumerate(layers)}
        self._options: dict[int, AttentionOptions] = {}
        self._latents: dict[int, LatentHeads] = {}
        self._slots: dict[int, torch.Tensor] = {}
        self._mixers = {
            index: Mixer(index, layer.geometry.states)
            for index, layer in enumerate(layers)
            if layer.geometry.states
        }
        self._group_size = -(-len(layers) // _NUM_LAYER_GROUPS)

    def process_after_load(self, device: torch.device) -> None:
        """Takes the weights of latent layers that multiply queries and results.

        Puts the numbers of the rank's KV heads on the device, because a copy in a step would wait.
        """
        for index, layer in self._layers.values():
            if self._tp.size > 1:
                slots = self._tp.kv_heads(layer.geometry)
                self._slots[index] = torch.tensor(slots, dtype=torch.int64, device=device)
            if layer.geometry.value_dim is not None:
                heads = self._tp.query_heads(layer.geometry)
                self._latents[index] = LatentHeads(layer.module, layer.geometry.num_heads, heads)

    @contextmanager
    def step(
        self,
        attention: StepAttention,
        on_layers: OnLayers | None,
        states: StepStates | None = None,
    ) -> Iterator[None]:
        """Makes the modules attend and mix in a step; `on_layers` as in `CausalLM.__call__`."""

        def begin(module: nn.Module) -> tuple[int, TracedLayer]:
            index, layer = self._layers[id(module)]
            if on_layers and index and index % self._group_size == 0:
                on_layers(index)
            return index, layer

        def mix(module: nn.Module, call: MixerCall) -> torch.Tensor:
            index, _ = begin(module) if isinstance(call, ConvCall) else self._layers[id(module)]
            assert states is not None
            return self._mixers[index].compute(call, states)

        def attend(
            module: nn.Module, heads: Heads, mask: torch.Tensor | None, options: dict[str, Any]
        ) -> torch.Tensor:
            index, layer = begin(module)
            if index not in self._options:
                query_dim = heads[0].shape[3]
                self._options[index] = self._read_options(options, layer.geometry, query_dim)
            return self._attend(attention, index, layer.geometry, heads)

        with attend_by(attend), mix_by(mix):
            yield

    def _attend(
        self, attention: StepAttention, index: int, layer: LayerGeometry, heads: Heads
    ) -> torch.Tensor:
        # [num_tokens, heads, head_dim]
        query, key, value = (each[0].transpose(0, 1) for each in heads)
        # If the plan does not split the projections, each rank attends for its part of the heads.
        is_whole = self._tp.size > 1 and query.shape[1] == layer.num_heads
        if is_whole:
            slots = self._slots[index]
            query = query[:, self._tp.query_heads(layer)]
            key = key[:, slots]
            value = value[:, slots]
        latent = self._latents.get(index)
        if latent:
            query = latent.absorb(query)
        query_dim = query.shape[2]
        value_dim = value.shape[2]
        dim = layer.head_dim
        if not latent and (query_dim < dim or value_dim < dim):
            query, key, value = (
                functional.pad(each, (0, dim - each.shape[2])) for each in (query, key, value)
            )
        is_kept = layer.reads is None
        result = attention(
            index,
            query.contiguous(),
            key.contiguous() if is_kept else None,
            (value if latent else value.contiguous()) if is_kept else None,
            self._options[index],
        )
        result = result.view(*query.shape[:2], -1)[..., :value_dim]
        if latent:
            result = latent.expand(result)
        if is_whole and self._tp.group:
            result = torch.cat(self._tp.group.all_gather(result.contiguous()), dim=1)
        return result[None]

    def _read_options(
        self, options: dict[str, Any], layer: LayerGeometry, query_dim: int
    ) -> AttentionOptions:
        sinks = options.get("s_aux") if options.get("sinks") is None else options["sinks"]
        if sinks is not None:
            sinks = sinks.float().flatten()
            if self._tp.size > 1 and len(sinks) == layer.num_heads:
                sinks = sinks[self._tp.query_heads(layer)].contiguous()
        scale = options.get("scaling") or query_dim**-0.5
        return AttentionOptions(scale=scale, soft_cap=options.get("softcap") or None, sinks=sinks)
