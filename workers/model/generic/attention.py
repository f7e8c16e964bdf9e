"""Defines the attention function that transformers' modules call.

It first traces which attention the modules need, and later attends over paged KV. It is registered
in transformers' `AttentionInterface`. Transformers creates no mask for a name that it does not
know: all sequences of a step are in one row of a batch, and only the step knows their limits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import signature
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedConfig

from ...engine.plan import OnLayers
from ...kv_cache.layout import LayerGeometry
from ..attention.backend import AttentionOptions, StepAttention
from ..config import CheckpointError, Fields, text_fields
from ..parallel import TensorParallel
from .config import INDEXED, context_tokens_of
from .latent import LatentHeads, is_latent, value_dim_of
from .sparse import CausalMask, without_mask

ATTENTION: Final = "tandem"
# Arguments that change nothing here.
_IGNORED: Final = {
    "cache_position",
    "deterministic",
    "dropout",
    "is_causal",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
}
_UNDERSTOOD: Final = {"scaling", "sliding_window", "softcap", "s_aux", "sinks"}
# The KV cache of one group of layers may be sent while the next group is computed.
_NUM_LAYER_GROUPS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """Describes the attention of one layer and the module that calls it."""

    module: nn.Module
    geometry: LayerGeometry


_Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value.

The query is [1, num_heads, num_tokens, head_dim], key and value are [1, num_kv_heads, num_tokens,
head_dim].
"""

_Attend = Callable[[nn.Module, _Heads, torch.Tensor | None, dict[str, Any]], torch.Tensor]
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
    """Attends in the layers of one model over the paged KV cache of a rank."""

    def __init__(self, layers: Sequence[AttentionLayer], tp: TensorParallel) -> None:
        self._tp = tp
        self._layers = {id(layer.module): (index, layer) for index, layer in enumerate(layers)}
        self._options: dict[int, AttentionOptions] = {}
        self._latents: dict[int, LatentHeads] = {}
        self._group_size = -(-len(layers) // _NUM_LAYER_GROUPS)

    def process_after_load(self) -> None:
        """Takes the weights of latent layers that multiply queries and results."""
        for index, layer in self._layers.values():
            if layer.geometry.value_dim is not None:
                heads = self._tp.query_heads(layer.geometry)
                self._latents[index] = LatentHeads(layer.module, layer.geometry.num_heads, heads)

    def step(
        self, attention: StepAttention, on_layers: OnLayers | None
    ) -> AbstractContextManager[None]:
        """Makes the modules attend in a step; `on_layers` as in `CausalLM.__call__`."""

        def attend(
            module: nn.Module, heads: _Heads, mask: torch.Tensor | None, options: dict[str, Any]
        ) -> torch.Tensor:
            index, layer = self._layers[id(module)]
            if on_layers and index and index % self._group_size == 0:
                on_layers(index)
            if index not in self._options:
                query_dim = heads[0].shape[3]
                self._options[index] = self._read_options(options, layer.geometry, query_dim)
            return self._attend(attention, index, layer.geometry, heads)

        return attend_by(attend)

    def _attend(
        self, attention: StepAttention, index: int, layer: LayerGeometry, heads: _Heads
    ) -> torch.Tensor:
        # [num_tokens, heads, head_dim]
        query, key, value = (each[0].transpose(0, 1) for each in heads)
        # If the plan does not split the projections, each rank attends for its part of the heads.
        is_whole = self._tp.size > 1 and query.shape[1] == layer.num_heads
        if is_whole:
            slots = list(self._tp.kv_heads(layer))
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
        result = attention(
            index,
            query.contiguous(),
            key.contiguous(),
            value if latent else value.contiguous(),
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


def trace_layers(
    decoder: nn.Module, config: PreTrainedConfig, fields: Fields
) -> list[AttentionLayer]:
    """Runs a decoder on `meta` and returns its attention layers in the order of their calls.

    Raises CheckpointError if a layer needs a feature that our attention lacks.
    """
    layers: list[AttentionLayer] = []
    given: set[str] = set()  # options, by name

    def trace(
        module: nn.Module, heads: _Heads, mask: torch.Tensor | None, options: dict[str, Any]
    ) -> torch.Tensor:
        if any(layer.module is module for layer in layers):
            raise fields.error(
                "architectures", "layers that share one attention module are not supported"
            )
        if mask is not None:
            raise fields.error("architectures", "attention with its own mask is not supported")
        geometry = _geometry(len(layers), module, heads, options, config)
        if geometry.num_heads % geometry.num_kv_heads:
            raise fields.error(
                "num_key_value_heads",
                f"{geometry.num_kv_heads} does not divide the {geometry.num_heads} query heads",
            )
        layers.append(AttentionLayer(module=module, geometry=geometry))
        _check_options(module, options, fields)
        given.update(options)
        query, _, value = heads
        value_dim = value_dim_of(module) if is_latent(module) else value.shape[3]
        return value.new_empty(1, query.shape[2], query.shape[1], value_dim)

    tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    positions = torch.zeros_like(tokens)
    hooks = ExitStack()
    try:
        with hooks, attend_by(trace):
            _keep_shapes(decoder, hooks)
            users = _position_users(decoder, positions, hooks)
            decoder(input_ids=tokens, position_ids=positions, use_cache=False)
    except CheckpointError:
        raise
    except Exception as error:
        problem = (
            f"transformers' {type(decoder).__name__} cannot be traced ({type(error).__name__})"
        )
        raise fields.error("architectures", problem) from error
    if layers and not users:
        raise fields.error(
            "architectures",
            f"{type(decoder).__name__} counts positions by itself, in the row of a batch, and "
            "takes no position_ids",
        )
    if "sliding_window" not in given:
        _check_no_window(config, fields)
    return layers


def _position_users(model: nn.Module, positions: torch.Tensor, undo: ExitStack) -> list[nn.Module]:
    """Returns a list to which the model's run adds the modules that use the positions.

    Such a module has a parameter position_ids. It gets the positions themselves or a view of them,
    such as equal positions on several axes. Other modules ignore the positions, or pass them on
    with all other arguments.
    """
    users: list[nn.Module] = []
    memory = positions.untyped_storage()._cdata

    def is_view(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == memory

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not any(map(is_view, (*args, *kwargs.values()))):
            return
        _, *names = signature(type(module).forward).parameters
        named = dict(zip(names, args, strict=False)) | kwargs
        if "position_ids" in names and is_view(named["position_ids"]):
            users.append(module)

    for module in model.modules():
        undo.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
    return users


def _check_no_window(config: Any, fields: Fields) -> None:
    """Raises CheckpointError if a model applies its window only in its own mask."""
    window = None
    if not getattr(config, "layer_types", None):
        window = getattr(config, "sliding_window", None)
    if isinstance(window, int) and window < context_tokens_of(config, text_fields(fields)):
        raise fields.error(
            "sliding_window", "is not supported: the model applies it in its own mask"
        )


def _keep_shapes(model: nn.Module, undo: ExitStack) -> None:
    """Makes modules that fail on `meta` return their input; the trace only follows shapes.

    For example, a router of tokens to experts needs numbers, which `meta` lacks.
    """
    for module in model.modules():
        if module is model:
            continue

        def forward(*args: Any, _plain: Callable[..., Any] = module.forward, **kwargs: Any) -> Any:
            try:
                return _plain(*args, **kwargs)
            except CheckpointError:
                raise
            except Exception:
                values = (*args, *kwargs.values())
                tensors = [each for each in values if isinstance(each, torch.Tensor)]
                if not tensors:
                    raise
                return tensors[0]

        own_forward = vars(module).get("forward")
        module.forward = forward
        if own_forward:
            undo.callback(setattr, module, "forward", own_forward)
        else:
            undo.callback(delattr, module, "forward")


def _check_options(module: nn.Module, options: dict[str, Any], fields: Fields) -> None:
    asked = {name for name, given in options.items() if given is not None and given is not False}
    if asked := asked - _IGNORED - _UNDERSTOOD:
        raise fields.error(
            "architectures", f"attention with {', '.join(sorted(asked))} is not supported"
        )
    if not isinstance(options.get("scaling", 1.0), float | int | None):
        raise fields.error("architectures", "attention whose scale is learned is not supported")
    if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise fields.error("architectures", "attention to later tokens is not supported")


def _geometry(
    index: int, module: nn.Module, heads: _Heads, options: dict[str, Any], config: Any
) -> LayerGeometry:
    query, key, value = heads
    return LayerGeometry(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=max(key.shape[3], value.shape[3]),
        window=_window(index, options, config),
        value_dim=value.shape[3] if is_latent(module) else None,
    )


def _window(index: int, options: dict[str, Any], config: Any) -> int | None:
    """Returns the window of a layer.

    Some modules pass no window, because transformers' mask for their layer's type has it.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[index] in ("full_attention", INDEXED):
        return None
    window = options.get("sliding_window")
    if kinds and not window:
        window = getattr(config, "sliding_window", None)
    return int(window) if window else None
