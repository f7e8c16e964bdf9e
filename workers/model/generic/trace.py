"""Traces a decoder of transformers on `meta`: which attention and which states its layers need."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from inspect import signature
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedConfig

from ...kv_cache.layout import LayerGeometry
from ..config import CheckpointError, Fields, text_fields
from .attention import Heads, TracedLayer, attend_by
from .config import INDEXED, context_tokens_of
from .latent import is_latent, value_dim_of
from .states.mixers import MixerCall, bind_mixers, keeps_other_state, mix_by
from .states.parts import derive_parts

# Arguments that change nothing here.
_IGNORED: Final = {
    "cache_position",
    "deterministic",
    "dropout",
    "input_ids",
    "is_causal",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
}
_COUNTS_PAST_PADDING: Final = "create_position_ids_from_input_ids"  # a method of embeddings
_UNDERSTOOD: Final = {"scaling", "sliding_window", "softcap", "s_aux", "sinks"}


class _Trace:
    """Collects the layers of a decoder in the order of their first calls."""

    def __init__(self, config: PreTrainedConfig, fields: Fields) -> None:
        self.options: set[str] = set()  # of attention, by name
        self.attention: dict[nn.Module, LayerGeometry] = {}
        self.calls: dict[nn.Module, list[MixerCall]] = {}
        self.modules: list[nn.Module] = []
        # Layers that keep keys and values of their own: the number of each, and the two tensors.
        self._kept: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._config = config
        self._fields = fields

    def attend(
        self,
        module: nn.Module,
        heads: Heads,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Notes the attention of a layer. Raises CheckpointError if ours lacks a feature of it."""
        if module in self.attention:
            raise self._fields.error(
                "architectures", "layers that share one attention module are not supported"
            )
        if mask is not None:
            raise self._fields.error(
                "architectures", "attention with its own mask is not supported"
            )
        geometry = _geometry(self._index(module), module, heads, options, self._config)
        if geometry.num_heads % geometry.num_kv_heads:
            raise self._fields.error(
                "num_key_value_heads",
                f"{geometry.num_kv_heads} does not divide the {geometry.num_heads} query heads",
            )
        query, key, value = heads
        reads = self._reads(geometry, key, value)
        if reads is None:
            self._kept.append((len(self.modules), key, value))
        self.modules.append(module)
        self.attention[module] = replace(geometry, reads=reads)
        _check_options(module, options, self._fields)
        self.options.update(options)
        value_dim = value_dim_of(module) if is_latent(module) else value.shape[3]
        return value.new_empty(1, query.shape[2], query.shape[1], value_dim)

    def mix(self, module: nn.Module, call: MixerCall) -> torch.Tensor:
        """Notes a call of a mixer."""
        if module not in self.calls:
            self.modules.append(module)
        self.calls.setdefault(module, []).append(call)
        return call.empty_result()

    def layers(self, mixers: dict[nn.Module, bool]) -> list[TracedLayer]:
        """Returns the layers. Raises CheckpointError if a mixer keeps its state in another way."""
        num_heads = max((each.num_heads for each in self.attention.values()), default=1)
        found = [(module, self.attention.get(module)) for module in self.modules]
        layers: list[TracedLayer] = []
        for module, geometry in found:
            if geometry is None:
                calls = self.calls[module]
                parts = derive_parts(calls, num_heads)
                if parts is None or (len(calls) == 2) != mixers[module]:
                    raise unknown_state(self._fields)
                geometry = LayerGeometry(
                    num_heads=num_heads, num_kv_heads=0, head_dim=0, states=parts
                )
            layers.append(TracedLayer(module=module, geometry=geometry))
        if not mixers.keys() <= self.calls.keys():
            raise unknown_state(self._fields)
        return layers

    def _reads(self, geometry: LayerGeometry, key: torch.Tensor, value: torch.Tensor) -> int | None:
        """Returns the number of the equal layer whose keys and values a layer was given."""
        return next(
            (
                number
                for number, kept_key, kept_value in self._kept
                if kept_key is key
                and kept_value is value
                and self.attention[self.modules[number]] == geometry
            ),
            None,
        )

    def _index(self, module: nn.Module) -> int:
        """Returns the number of a layer with attention among all layers of the config."""
        index = getattr(module, "layer_idx", None)
        if self.calls and isinstance(index, int) and index >= 0:
            return index
        return len(self.attention)


def unknown_state(fields: Fields) -> CheckpointError:
    """Returns the error for a model whose state is none of the parts that layers can keep."""
    kind = fields.text("model_type")
    return fields.error("model_type", f"{kind!r:.60} keeps state in a way that is not supported")


def trace_layers(
    decoder: nn.Module, config: PreTrainedConfig, fields: Fields, *, has_state: bool
) -> list[TracedLayer]:
    """Runs a decoder on `meta` and returns its layers in the order of their calls.

    A layer has attention, or a mixer with states. Raises CheckpointError if a layer needs a feature
    that ours lacks; a decoder with `has_state` must keep all its state in mixers.
    """
    mixers = bind_mixers(decoder)
    if has_state and keeps_other_state(decoder, mixers):
        raise unknown_state(fields)
    found = _Trace(config, fields)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    positions = torch.zeros_like(tokens)
    hooks = ExitStack()
    try:
        with hooks, attend_by(found.attend), mix_by(found.mix):
            _keep_shapes(decoder, hooks)
            users = _position_users(decoder, positions, hooks)
            decoder(input_ids=tokens, position_ids=positions, use_cache=False)
    except CheckpointError:
        raise
    except Exception as error:
        if has_state and not mixers:
            raise unknown_state(fields) from error
        problem = (
            f"transformers' {type(decoder).__name__} cannot be traced ({type(error).__name__})"
        )
        raise fields.error("architectures", problem) from error
    if found.attention and not users:
        raise fields.error(
            "architectures",
            f"{type(decoder).__name__} counts positions by itself, in the row of a batch, and "
            "takes no position_ids",
        )
    if any(hasattr(module, _COUNTS_PAST_PADDING) for module in decoder.modules()):
        raise fields.error(
            "architectures",
            f"{type(decoder).__name__} counts positions from the number of its padding token on; "
            "only positions from 0 on are supported",
        )
    if "sliding_window" not in found.options:
        _check_no_window(config, fields)
    return found.layers(mixers)


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
    index: int, module: nn.Module, heads: Heads, options: dict[str, Any], config: Any
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
