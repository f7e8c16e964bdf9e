"""Wraps a transformers decoder as a `CausalLM`.

A flat batch becomes one row, attention is ours, and our loader reads the weights.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ...engine.plan import OnLayers
from ..attention.backend import StepAttention
from ..config import Fields, ModelConfig, plain_name, text_fields
from ..footprint import check_config_split
from ..layers.linear import BuildOptions
from ..layers.rows import EmbeddingRows
from ..models.family import CausalLM
from ..models.parsing import parse_dtype, parse_quantization, without_prefixes
from ..module import Module, Parameter, WeightSlice
from ..parallel import TensorParallel
from ..quant.base import LinearMethod
from ..quant.rounded import RoundedLinearMethod
from ..quant.unquantized import UnquantizedLinearMethod
from ..states.steps import StepStates
from .attention import PagedLayers
from .buffers import fill_buffers
from .config import architecture_of, context_tokens_of
from .definition import build_on_meta
from .experts import use_packed_experts
from .fused import use_kernels
from .latent import latent_projections
from .linear import LinearSource
from .sparse import dense_tokens_of
from .tensor_parallel import TpPlan, linears_alone
from .weights import WeightGroup, find_weight_groups, set_tensor


class _Source(Module):
    """Holds a rank's part of one tensor of the checkpoint."""

    def __init__(self, parameter: Parameter) -> None:
        self.weight = parameter


class _Weights(Module):
    """Holds the sources of a group's weights until they are loaded into the transformers model."""

    def __init__(self, model: PreTrainedModel, group: WeightGroup, plan: TpPlan) -> None:
        self._model = model
        self._group = group
        self._plan = plan
        slices = [plan.slices(group.target, shape, group.stacks) for _, shape, _ in group.sources]
        if group.converter is not None and not group.stacks:
            slices = [None] * len(slices)
        self._is_whole = None in slices
        dtype = model.get_parameter_or_buffer(group.target).dtype
        # Newer checkpoints of multimodal models have the names of transformers' modules.
        others = (group.target,) if group.converter is None else ()
        self.sources = [
            _Source(
                Parameter(
                    *(WeightSlice(name, shape, each, other_names=others) for each in parts or [()]),
                    dtype=dtype,
                )
            )
            for (name, shape, _), parts in zip(group.sources, slices, strict=True)
        ]

    def process_after_load(self) -> None:
        """Converts the sources and drops them."""
        converted = self._group.convert(
            self._model, [source.weight.data for source in self.sources]
        )
        self.sources = []
        for name, tensor in converted.items():
            data = self._plan.cut(name, tensor) if self._is_whole else tensor
            set_tensor(self._model, name, data)


class _Given:
    """Replaces the model below the head, its decoder and its output by given hidden states.

    It keeps the numbers of the model, because the head may multiply by one.
    """

    def __init__(self, model: nn.Module) -> None:
        numbers = {name: each for name, each in vars(model).items() if type(each) in (int, float)}
        vars(self).update(numbers)
        self.last_hidden_state: torch.Tensor | None = None  # [1, num_rows, hidden]
        self.decoder = self

    def __call__(self, *args: Any, **kwargs: Any) -> "_Given":
        return self

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class TransformersForCausalLM(CausalLM):
    """Runs a decoder of transformers."""

    def __init__(self, config: ModelConfig, build: BuildOptions) -> None:
        """Raises ValueError if the model cannot be split over the ranks.

        Raises CheckpointError for experts whose weights would be rounded when they are loaded.
        """
        check_config_split(config, build.tp.size)
        fields = Fields("config.json", dict(config.transformers or {}))
        decoder = build_on_meta(fields, build.dtype)
        self._model = decoder.model
        self._below = decoder.below
        self._dtype = build.dtype
        self._plan = TpPlan(self._model, build.tp)
        self.layers = tuple(layer.geometry for layer in decoder.layers)
        self._layers = PagedLayers(decoder.layers, build.tp)
        try:
            groups = find_weight_groups(self._model)
        except LookupError as error:
            problem = f"transformers' conversion of its weights has no way back to {error.args[0]}"
            raise fields.error("architectures", problem) from error
        self._linear_method = build.linear_method
        self._has_text_prefixes = bool(config.text_model_of)
        self.linears = self._linear_sources(groups)
        taken = {f"{each.name}.{kind}" for each in self.linears for kind in ("weight", "bias")}
        rest = [group for group in groups if group.target not in taken]
        if config.is_rounded:
            _check_no_experts(self._model, rest, config, fields)
        self.weights = [_Weights(self._model, group, self._plan) for group in rest]

    def _linear_sources(self, groups: Sequence[WeightGroup]) -> list[LinearSource]:
        """Returns the sources of the linear maps that are not plain.

        Nothing may convert the weight of such a map, or multiply by it but the map.
        """
        linears = linears_alone(self._model)
        for name in latent_projections(self._model):
            linears.pop(name, None)
        made: list[LinearSource] = []
        for group in groups:
            name = group.target.removesuffix(".weight")
            stored_name = group.sources[0][0].removesuffix(".weight")
            if group.converter or name not in linears or group.target == name:
                continue
            method = self._method_of(linears[name], stored_name)
            partition = self._plan.partition(name, linears[name], stored_name)
            if partition is not None and not isinstance(method, UnquantizedLinearMethod):
                made.append(LinearSource(name, linears[name], method, partition))
        return made

    def _method_of(self, module: nn.Linear, stored_name: str) -> LinearMethod:
        """Returns the linear method of a layer by its name in the checkpoint.

        Formats know the head as lm_head; some decoders have another name for it.
        """
        name = plain_name(stored_name) if self._has_text_prefixes else stored_name
        names = [name]
        if module is self._model.get_output_embeddings():  # type: ignore[no-untyped-call]
            names.append("lm_head")
        methods = [self._linear_method(each) for each in names]
        plain = [each for each in methods if isinstance(each, UnquantizedLinearMethod)]
        return plain[0] if plain else methods[-1]

    def _tied_methods(self) -> dict[str, LinearMethod]:
        """Returns the methods of linear maps that share a loaded weight, by their names.

        A head has the weight of the embedding; other maps have a weight of another layer.
        """
        made: dict[str, LinearMethod] = {}
        linears = linears_alone(self._model)
        methods = {each.name: each.method for each in self.linears}
        for target, source in self._model.all_tied_weights_keys.items():
            name = target.removesuffix(".weight")
            if name not in linears or linears[name].bias is not None:
                continue
            if shared := methods.get(source.removesuffix(".weight")):
                made[name] = shared
                continue
            weight = linears[name].weight.data
            tied = Parameter(WeightSlice(target, tuple(weight.shape)), dtype=weight.dtype)
            tied.data = weight
            method = self._method_of(linears[name], name)
            if isinstance(method, RoundedLinearMethod) and method.tie(tied):
                method.process_after_load()
                made[name] = method
        return made

    def process_after_load(self) -> None:
        """Computes buffers such as rotary frequencies, and separates the head from the model."""
        model = self._model
        device = next(each.device for each in model.parameters() if not each.is_meta)
        for source in self.linears:
            source.empty(device)
        fill_buffers(model, device)
        model.tie_weights()
        for target, source in model.all_tied_weights_keys.items():
            if self._plan.is_split(target) and not self._plan.is_split(source):
                part = self._plan.cut(target, model.get_parameter(source).data)
                set_tensor(model, target, part)
        self._layers.process_after_load(device)
        use_kernels(model, self._dtype, self._plan)
        use_packed_experts(model)
        methods = {source.name: source.method for source in self.linears}
        self._plan.install(model, methods | self._tied_methods())
        self._given = _Given(model.base_model)
        del model._modules[model.base_model_prefix]
        vars(model)[model.base_model_prefix] = self._given

    @property
    def code(self) -> type:
        return type(self._below)

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        on_layers: OnLayers | None = None,
        rows: EmbeddingRows | None = None,
        states: StepStates | None = None,
    ) -> torch.Tensor:
        with self._layers.step(attention, on_layers, states), self._replaced(rows):
            output = self._below(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False
            )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def _replaced(self, rows: EmbeddingRows | None) -> AbstractContextManager[object]:
        """Puts rows into the output of the embedding, until the result is closed.

        The model still gets all token ids: some layers of Gemma 3n look them up as well.
        """
        if rows is None:
            return nullcontext()

        def put(module: nn.Module, args: object, embeddings: torch.Tensor) -> torch.Tensor:
            return rows.put(embeddings[0])[None]  # [1, num_tokens, hidden]

        embedding = self._below.get_input_embeddings()  # type: ignore[operator]
        handle: RemovableHandle = embedding.register_forward_hook(put)
        return handle

    def normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden  # the decoder's output is normalized

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._given.last_hidden_state = hidden[None]
        # Gemma 4's head reads the number of rows from the model's input.
        output = self._model(inputs_embeds=hidden[None], use_cache=False)
        logits: torch.Tensor = output.logits[0]
        return logits


def _check_no_experts(
    model: PreTrainedModel, groups: Sequence[WeightGroup], config: ModelConfig, fields: Fields
) -> None:
    """Raises CheckpointError if a model has stacked experts, which cannot be rounded."""
    quant_method = config.quantization["quant_method"]
    for name in (group.target for group in groups):
        owner = model.get_submodule(name.rpartition(".")[0])
        if model.get_parameter_or_buffer(name).ndim == 3 and not isinstance(owner, nn.Conv1d):
            raise fields.error(
                "architectures",
                f"{config.architecture!r} runs through transformers' code, and {quant_method} "
                f"cannot be applied to its experts {name}",
            )


def parse_transformers_config(fields: Fields) -> ModelConfig:
    """Returns the config of a transformers decoder. Raises CheckpointError as `build_on_meta`."""
    decoder = build_on_meta(fields, torch.float32)
    config = decoder.config
    try:
        has_plan = TpPlan(decoder.model, TensorParallel(size=2)) is not None
    except ValueError:
        has_plan = False
    architecture = architecture_of(fields)
    is_text_model = config is not decoder.model.config
    quantization = parse_quantization(fields)
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        layers=tuple(layer.geometry for layer in decoder.layers),
        ropes=(None,) * len(decoder.layers),
        max_position_embeddings=context_tokens_of(config, text_fields(fields)),
        norm_eps=0.0,
        tie_word_embeddings=bool(decoder.model.all_tied_weights_keys),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        dtype=parse_dtype(fields),
        transformers=dict(fields.items()),
        quantization=without_prefixes(quantization) if is_text_model else quantization,
        has_tp_plan=has_plan,
        dense_tokens=dense_tokens_of(config),
        text_model_of=architecture if is_text_model else "",
    )
