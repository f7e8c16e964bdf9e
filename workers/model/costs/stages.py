"""Lists the tensors of a forward pass with their shapes, from the geometry of the layers."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ...kv_cache.layout import LayerGeometry
from ..config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Names a tensor of the model's forward pass, with its shape in prefill and in decode."""

    name: str
    axes: str  # the meaning of each axis, such as B x T x d
    prefill: tuple[int, ...]
    decode: tuple[int, ...]  # of the first decode step


def list_stages(config: ModelConfig, prompt_tokens: int) -> tuple[Stage, ...]:
    """Returns the stages of a prompt of `prompt_tokens`, alone in its batch.

    The letters: B sequences, T new tokens, S tokens attended to, d the hidden size, H query heads,
    K KV heads, h the size of a head, V the vocabulary. Layers of equal geometry are one stage.
    """
    width = config.hidden_size
    found = [
        _stage("token ids", "B x T", prompt_tokens),
        _stage("embedding", "B x T x d", prompt_tokens, width),
    ]
    kinds: dict[LayerGeometry, list[int]] = {}
    for number, layer in enumerate(config.layers):
        kinds.setdefault(replace(layer, reads=None), []).append(number)
    for layer, numbers in kinds.items():
        where = f"{len(numbers)} of {len(config.layers)} layers" if len(kinds) > 1 else "each layer"
        found += _of_layer(layer, where, prompt_tokens)
    found += _of_mlp(config, prompt_tokens)
    found.append(_stage("last norm", "B x T x d", prompt_tokens, width))
    one = (1, 1, config.vocab_size)  # only the last position is multiplied by the head
    found.append(Stage(name="logits", axes="B x 1 x V", prefill=one, decode=one))
    return tuple(found)


def _of_layer(layer: LayerGeometry, where: str, prompt_tokens: int) -> Iterable[Stage]:
    for part in layer.states:
        shape = (1, part.num_heads, part.planes * part.row)
        yield Stage(
            name=f"state {part.name}, {where}", axes="B x H x row", prefill=shape, decode=shape
        )
    if not layer.num_kv_heads:
        return
    heads, size = layer.num_heads, layer.head_dim
    yield _stage(f"Q, {where}", "B x T x H x h", prompt_tokens, heads, size)
    if layer.value_dim is None:
        yield _stage(f"K and V, {where}", "B x T x K x h", prompt_tokens, layer.num_kv_heads, size)
    else:
        yield _stage(f"latent row, {where}", "B x T x h", prompt_tokens, size)
    seen, next_seen = (
        min(tokens, layer.window or tokens) for tokens in (prompt_tokens, prompt_tokens + 1)
    )
    yield Stage(
        name=f"scores Q K^T, {where}",
        axes="B x H x T x S",
        prefill=(1, heads, prompt_tokens, seen),
        decode=(1, heads, 1, next_seen),
    )
    value = layer.value_dim or size
    yield _stage(f"attention output, {where}", "B x T x H x h", prompt_tokens, heads, value)


def _of_mlp(config: ModelConfig, prompt_tokens: int) -> Iterable[Stage]:
    experts = config.experts
    if experts is None or len(experts.layers) < len(config.layers):
        yield _stage("MLP, inner", "B x T x inner", prompt_tokens, config.intermediate_size)
    if experts is not None:
        name = f"experts, inner, {experts.num_chosen} of {experts.num_experts} for each token"
        yield _stage(
            name,
            "B x T x chosen x inner",
            prompt_tokens,
            experts.num_chosen,
            experts.intermediate_size,
        )


def _stage(name: str, axes: str, prompt_tokens: int, *sizes: int) -> Stage:
    """Returns a stage whose second axis has the new tokens: all of the prompt, then one."""
    return Stage(name=name, axes=axes, prefill=(1, prompt_tokens, *sizes), decode=(1, 1, *sizes))
