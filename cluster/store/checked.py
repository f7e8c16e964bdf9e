"""Resolves MODEL and checks, before anything starts, that it can be served as configured."""

import logging
from pathlib import Path

from ...proto.errors import InvalidArgument, TandemError
from ...router.frontend.template import TEMPLATE_OF_MODEL, start_for
from ...workers.model.adapter_folder import read_adapter
from ...workers.model.config import CheckpointError
from ...workers.model.footprint import (
    check_cache_dtype,
    check_config_split,
    check_device,
    check_disk,
    check_draft,
)
from ..config import TandemConfig
from .generation_defaults import generation_defaults
from .store import resolve_model

_log = logging.getLogger(__name__)


def checked_folder(config: TandemConfig) -> Path:
    """Returns the model's folder, fetched if needed, after checking that it can be served.

    Raises the errors of `resolve_model` and `check_folder`.
    """
    folder = resolve_model(config.model, dtype=config.dtype)
    check_folder(config, folder)
    return folder.resolve()


def check_folder(config: TandemConfig, folder: Path) -> None:
    """Checks that the model in `folder`, which `resolve_model` has returned, can be served.

    A second call of `resolve_model` would ask the hub and read all weights again.

    `config` must come from `with_draft_folder`. Raises CheckpointError, InvalidArgument for a
    `context_tokens` beyond the model's, or InvalidArgument with all other reasons: a `tp` that does
    not divide the model's heads, a `kv_cache_dtype` that the model cannot have, a `device` that
    cannot run it, an unusable draft model, adapter or `chat_template`. Logs a warning for a
    `state_slots` without effect.
    """
    start_for(folder)
    # These import torch, which takes a second.
    from ...workers.model.adapter import check_adapter
    from ...workers.model.loader import open_checkpoint

    model = open_checkpoint(
        folder,
        config.model_impl,
        quantization=config.quantization,
        context_tokens=config.context_tokens,
    ).config
    generation_defaults(config, folder)
    _check_chat_template(config, folder)
    draft = config.speculative
    wrong = []
    if draft is not None and draft.model is not None:
        try:
            check_draft(open_checkpoint(Path(draft.model)).config, model)
        except ValueError as error:
            wrong.append(f"speculative.model: {error}")
    try:
        check_device(model, config.device, batch_invariant=config.numerics == "exact")
        check_cache_dtype(model, config.kv_cache_dtype, config.device)
    except ValueError as error:
        wrong.append(str(error))
    for role, pool in config.pools.items():
        try:
            check_config_split(model, pool.tp)
            if pool.kv_disk is not None:
                check_disk(model)
        except ValueError as error:
            wrong.append(f"{role}.{error}")
    for name, path in config.adapters.items():
        try:
            check_adapter(read_adapter(Path(path), config.lora.max_lora_rank), model)
        except CheckpointError as error:
            wrong.append(f"adapters.{name}: {error}")
    if wrong:
        raise InvalidArgument("\n".join(wrong))
    given = [role for role, pool in config.pools.items() if pool.state_slots is not None]
    if given and not any(layer.states for layer in model.layers):
        names = " and ".join(f"{role}.state_slots" for role in given)
        _log.warning("%s: no effect, because this model keeps no recurrent states", names)


def _check_chat_template(config: TandemConfig, folder: Path) -> None:
    """Renders a short chat.

    Raises CheckpointError or, if the configuration has a template or its variables,
    InvalidArgument.
    """
    from ...router.frontend.tokenizer import Tokenizer  # with transformers, which takes a second

    try:
        tokenizer = Tokenizer.load(
            folder,
            chat_template=config.chat_template,
            chat_template_kwargs=config.chat_template_kwargs,
        )
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    try:
        tokenizer.check_chat_template()
    except ValueError as error:
        if config.chat_template is not None:
            reason = str(error).removeprefix(TEMPLATE_OF_MODEL)
            raise InvalidArgument(reason, "chat_template") from None
        if config.chat_template_kwargs:
            raise InvalidArgument(str(error), "chat_template_kwargs") from None
        raise CheckpointError(str(error)) from None


def with_draft_folder(config: TandemConfig) -> TandemConfig:
    """Returns the configuration with the folder of the draft model, fetched if needed, as its name.

    Raises the errors of `resolve_model`; their text names the field.
    """
    if config.speculative is None or config.speculative.model is None:
        return config
    try:
        folder = resolve_model(config.speculative.model, dtype=config.dtype).resolve()
    except (TandemError, CheckpointError) as error:
        raise type(error)(f"speculative.model: {str(error).removeprefix('model: ')}") from None
    draft = config.speculative.model_copy(update={"model": str(folder)})
    return config.model_copy(update={"speculative": draft})
