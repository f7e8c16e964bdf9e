"""Generates, tokenizes and detokenizes for all APIs. Knows nothing of gRPC, HTTP or workers."""

import logging
import re
import secrets
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import Final

from ...proto import inference_pb2, limits
from ...proto.costs import GROWTH_TOKENS
from ...proto.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    KeyLimitReached,
    NotFound,
    Overloaded,
    PermissionDenied,
    TandemError,
    Unavailable,
)
from ...proto.metrics import Metrics
from ...proto.parameters import ROWS, check_count, check_token_ids, check_value
from ..adapters import AdapterAdmin, AdapterRegistry
from ..auth.authenticator import Caller
from ..deadline import before, deadline_passed
from ..frontend.fair_threads import COPYING
from ..frontend.prepare import RequestContext, check_prompt, encode_prompt, prepare
from ..frontend.prepared import PreparedRequest
from ..frontend.served_model import ServedModel
from ..output.processor import OutputProcessor
from ..request import TokenSource
from ..resume.policy import ResumePolicy
from ..resume.tokens import ResumeKey
from ..scheduling.admission import Admission
from ..scheduling.capacity import Capacity
from ..slo import SloOutcome, find_slo, first_token_due
from ..storage.interface import Storage
from ..storage.local import LocalStorage
from ..telemetry.requests import RequestFacts, RequestTelemetry, count_slo
from ..telemetry.trace import CURRENT_REQUEST
from .dialect import Dialect

_log = logging.getLogger(__name__)

_PIECE_TOKENS: Final = 8_192  # copied in one call, which holds the interpreter's lock
_MAX_FRAMES: Final = 20  # in the log, the last ones: a recursion has a thousand
_MAX_LISTED: Final = 16  # names in an error
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)

_CHARACTERS_PER_TOKEN: Final = 4


@contextmanager
def tandem_errors_only() -> Iterator[None]:
    """Turns any exception except a TandemError into InternalError: it is a defect of the service.

    Logs where it was raised, but not its text, which may hold a prompt or a key.
    """
    try:
        yield
    except TandemError:
        raise
    except Exception as error:
        places = [
            f"{Path(each.filename).name}:{each.lineno} {each.name}"
            for each in extract_tb(error.__traceback__, limit=-_MAX_FRAMES)
        ]
        _log.error(
            "a request failed by a defect of the service: %s at %s",
            type(error).__name__,
            " > ".join(places),
        )
        raise InternalError("the service failed at this request") from error


class GenerationService:
    """Serves the models of one TokenSource."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        source: TokenSource,
        admission: Admission | None = None,
        resume_key: bytes | None = None,
        telemetry: RequestTelemetry | None = None,
        adapters: AdapterAdmin | None = None,
        names: Collection[str] = (),
        aliases: Collection[str] = (),
        resume_policy: ResumePolicy | None = None,
        storage: Storage | None = None,
        dialect: Dialect = Dialect(),
        reset_cache: Callable[[], Awaitable[Mapping[str, str]]] | None = None,
    ) -> None:
        """Takes at least one of `models`; `source` generates for all of them.

        `admission`: of the dispatcher; refuses requests before tokenization that it would refuse
        later. `resume_key`: 32 secret bytes; services with the same key resume each other's
        requests; None: a random key. `telemetry` follows each running request. `adapters`: of the
        first model, each served under its name. `names` and `aliases`: other names of the first
        model. The names are listed. Of the aliases only those in the form of a hub id are listed,
        because clients should not see the path of a folder. `storage` keeps responses, files and
        batches; None: in memory, for this service alone. `dialect`: of the HTTP APIs.
        `reset_cache` empties the prefix caches of all workers, and returns by worker the reason why
        one has not; None: there is no cache.
        """
        self.http_port = 0  # of the HTTP API beside the gRPC API, once it listens
        self._models = {model.name: model for model in models}
        hub_ids = filter(_HUB_ID.fullmatch, aliases)
        self._listed = [
            each for each in dict.fromkeys((*names, *hub_ids)) if each not in self._models
        ]
        self._aliases = dict.fromkeys((*names, *aliases), models[0])
        self._adapters = adapters or AdapterAdmin(AdapterRegistry())
        self._source = source
        self._admission = admission
        self._resume_key = ResumeKey(resume_key or secrets.token_bytes(32))
        self._resume_policy = resume_policy or ResumePolicy()
        self.telemetry = telemetry or RequestTelemetry()
        self.storage = storage or LocalStorage()
        self.dialect = dialect
        self._reset_cache = reset_cache

    @property
    def models(self) -> list[ServedModel]:
        """The listed models: the model itself first, then its other names and its adapters."""
        base = self._models[self.base_name]
        found = list(self._models.values())
        found += [replace(base, name=name) for name in self._listed]
        taken = self._models.keys() | self._aliases.keys()
        found += [
            replace(base, name=each.name, adapter=each)
            for each in self._adapters.registry.adapters
            if each.name not in taken
        ]
        return found

    @property
    def base_name(self) -> str:
        """The name of the model that the adapters belong to."""
        return next(iter(self._models))

    @property
    def metrics(self) -> Metrics:
        """The metrics of the requests, which the servers share."""
        return self.telemetry.metrics

    async def accept(
        self, request: inference_pb2.GenerateRequest, context: RequestContext
    ) -> PreparedRequest:
        """Checks and tokenizes a request; counts one that the service refuses in its SLO class.

        Raises InvalidArgument, NotFound, Overloaded, Unavailable or DeadlineExceeded.
        """
        trace_id = context.trace.trace_id if context.trace else ""
        CURRENT_REQUEST.set((request.request_id, trace_id))
        model = self.model(request.model)
        is_resumable = context.is_resumable or context.event_id is not None
        checked = prepare(
            request,
            model,
            context,
            admit=partial(self._check_admission, request, model, context),
            resume_key=self._resume_key if is_resumable else None,
            resume_policy=self._resume_policy,
        )
        try:
            prepared = await before(context.deadline, checked)
        except KeyLimitReached:
            raise
        except (Overloaded, DeadlineExceeded, Unavailable) as error:
            # `prepare` has checked the class before it can wait or be refused.
            slo = find_slo(model.slo, request.service_tier, is_batch=context.is_batch)
            outcome: SloOutcome = "refused" if isinstance(error, Overloaded) else "failed"
            count_slo(self.metrics, slo, outcome)
            raise
        CURRENT_REQUEST.set((prepared.request_id, trace_id))
        if prepared.num_restored:
            # Workers compute them again.
            context.caller.quota.take_tokens(prepared.num_restored)
        return prepared

    def run(
        self, request: PreparedRequest, timeline: inference_pb2.Timeline
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Yields the completions of one prompt.

        Only the last message of a completion has a finish reason. Only the last message of all has
        the usage. The messages report every generated token id up to the end of a stop string,
        including the one that ends the completion. A message may have ids whose text comes later.

        `timeline` gets its request_id at once; it is complete when the generator has ended. Close
        the generator to cancel. Raises a TandemError.
        """
        timeline.request_id = request.request_id
        outputs = OutputProcessor(request, timeline)
        execution = self.telemetry.track(_facts(request), timeline, outputs)
        deltas = self._source.generate(request.tokens, timeline, outputs.cancelled)
        return outputs.run(deltas, execution)

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, caller: Caller
    ) -> inference_pb2.TokenizeResponse:
        """Returns the token ids of `encode` as a message."""
        ids = await self.encode(request, caller)
        return await COPYING.run(caller.fairness_id, len(ids), _token_message, ids)

    async def encode(
        self,
        request: inference_pb2.TokenizeRequest,
        caller: Caller,
        deadline: float | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Returns the token ids that `run` would use. Charges the caller as for a prompt.

        Raises InvalidArgument, NotFound, Overloaded or DeadlineExceeded.
        """
        model = self.model(request.model)

        async def check_and_encode() -> list[int]:
            await check_prompt(request.prompt, model, caller.fairness_id)
            return await encode_prompt(
                request.prompt, model.tokenizer, caller, add_special_tokens=add_special_tokens
            )

        return await before(deadline, check_and_encode())

    async def detokenize(
        self,
        request: inference_pb2.DetokenizeRequest,
        caller: Caller,
        deadline: float | None = None,
    ) -> inference_pb2.DetokenizeResponse:
        """Returns the text of token ids with special tokens. Charges the caller as for a prompt.

        Raises InvalidArgument, NotFound, Overloaded or DeadlineExceeded.
        """
        tokenizer = self.model(request.model).tokenizer
        ids = request.token_ids
        check_count(len(ids), limits.MAX_TOKENS, "ids", "token_ids")
        caller.quota.check_tokens()
        check = partial(check_token_ids, ids, tokenizer.vocab_size, "token_ids")
        await COPYING.run(caller.fairness_id, len(ids), check)
        caller.quota.take_tokens(len(ids))  # even if the deadline passes during the work
        text = await before(deadline, tokenizer.detokenize(ids, caller.fairness_id))
        return inference_pb2.DetokenizeResponse(text=text)

    async def detect_watermark(
        self,
        request: inference_pb2.DetectWatermarkRequest,
        caller: Caller,
        deadline: float | None = None,
    ) -> inference_pb2.DetectWatermarkResponse:
        """Returns the evidence for the service's watermark. Charges the caller as for a prompt.

        Raises InvalidArgument, NotFound, Overloaded or DeadlineExceeded.
        """
        rules = self.model(request.model).watermark
        if rules is None:
            raise NotFound("this service has no key for a watermark; set watermark.key_file")
        if request.prompt.HasField("chat") or request.prompt.suffix:
            raise InvalidArgument("must be a text or token ids", "prompt")
        encoding = inference_pb2.TokenizeRequest(model=request.model, prompt=request.prompt)
        ids = await self.encode(encoding, caller, deadline, add_special_tokens=False)
        found = await COPYING.run(caller.fairness_id, len(ids), rules.detect, ids)
        return inference_pb2.DetectWatermarkResponse(
            z=found.z, p=found.p, num_tokens=found.num_tokens, num_green=found.num_green
        )

    async def list_models(
        self, _request: inference_pb2.ListModelsRequest, _caller: Caller | None = None
    ) -> inference_pb2.ListModelsResponse:
        """Returns the names of all models and their context lengths."""
        models = [
            inference_pb2.Model(
                id=each.name,
                context_tokens=each.context_tokens,
                parent=self.base_name if each.adapter else "",
            )
            for each in self.models
        ]
        return inference_pb2.ListModelsResponse(models=models, http_port=self.http_port)

    async def load_adapter(
        self, request: inference_pb2.LoadLoraAdapterRequest, caller: Caller
    ) -> inference_pb2.LoadLoraAdapterResponse:
        """Loads a LoRA adapter.

        Raises PermissionDenied, InvalidArgument, Overloaded or Unavailable.
        """
        await self._adapters.load(
            caller, request.lora_name, request.lora_path, self._models | self._aliases
        )
        return inference_pb2.LoadLoraAdapterResponse()

    async def unload_adapter(
        self, request: inference_pb2.UnloadLoraAdapterRequest, caller: Caller
    ) -> inference_pb2.UnloadLoraAdapterResponse:
        """Accepts no more requests for an adapter. Raises PermissionDenied or NotFound."""
        await self._adapters.unload(caller, request.lora_name)
        return inference_pb2.UnloadLoraAdapterResponse()

    async def reset_prefix_cache(self, caller: Caller) -> Mapping[str, str]:
        """Empties the prefix caches of all workers; returns by worker why one has not.

        Raises PermissionDenied.
        """
        if not caller.sees_all:
            raise PermissionDenied("only an operator's key may reset the prefix cache")
        return {} if self._reset_cache is None else await self._reset_cache()

    def limit_context(self, least: int, most: int) -> None:
        """Serves sequences of at most `most` tokens, of which every worker holds `least`.

        Requests that are accepted already keep their context.
        """
        self._models = {name: each.held_by(least, most) for name, each in self._models.items()}
        self._aliases = dict.fromkeys(self._aliases, self._models[self.base_name])

    def model(self, name: str) -> ServedModel:
        """Returns the model of this name, or for "" the only model.

        Raises InvalidArgument or NotFound.
        """
        if not name and len(self._models) == 1:
            return self._models[self.base_name]
        check_value(ROWS["model"], name, "model")
        if model := self._models.get(name) or self._aliases.get(name):
            return model
        if adapter := self._adapters.registry.get(name):
            return replace(self._models[self.base_name], name=name, adapter=adapter)
        served = [model.name for model in self.models]
        more = f" and {len(served) - _MAX_LISTED} more" if len(served) > _MAX_LISTED else ""
        raise NotFound(
            f"model: {name!r} is not served here; served: {', '.join(served[:_MAX_LISTED])}{more}"
        )

    def _check_admission(
        self, request: inference_pb2.GenerateRequest, model: ServedModel, context: RequestContext
    ) -> None:
        """Refuses a request before its tokenization if admission would refuse it afterwards.

        Raises KeyLimitReached, DeadlineExceeded, Overloaded, Unavailable if no worker can take it,
        or the error of `Admission.stop`.
        """
        caller = context.caller
        caller.quota.check_tokens()
        if context.deadline is not None and time.monotonic() >= context.deadline:
            raise deadline_passed()
        # A resumption is admitted at once, if its tokens are valid.
        is_resumption = bool(request.resume or context.event_id)
        if self._admission is not None and not is_resumption:
            slo = find_slo(model.slo, request.service_tier, is_batch=context.is_batch)
            self._admission.check_early(
                _estimated(request),
                caller.tenant,
                caller.priority(request.priority),
                context.deadline,
                first_token_due(slo, context.arrived),
                context.arrived,
            )


def _token_message(ids: Sequence[int]) -> inference_pb2.TokenizeResponse:
    message = inference_pb2.TokenizeResponse()
    for begin in range(0, len(ids), _PIECE_TOKENS):
        message.token_ids.extend(ids[begin : begin + _PIECE_TOKENS])
    return message


def _facts(request: PreparedRequest) -> RequestFacts:
    tokens, submit = request.tokens, request.tokens.submit
    return RequestFacts(
        request_id=request.request_id,
        arrived=tokens.arrived,
        began=time.time() - time.monotonic() + tokens.arrived,
        num_prompt=len(submit.token_ids),
        num_choices=request.num_returned,
        max_tokens=submit.max_tokens,
        model=request.model,
        tenant=tokens.tenant,
        key_name=request.key_name,
        is_chat=request.chat is not None,
        is_embedding=bool(submit.pooling),
        is_batch=tokens.is_batch,
        temperature=submit.sampling.temperature,
        top_p=submit.sampling.top_p,
        trace=request.trace,
        prompt=() if request.begun else submit.token_ids,
        prefix_salt=tokens.prefix_salt,
        slo=request.slo,
    )


def _estimated(request: inference_pb2.GenerateRequest) -> Capacity:
    """Estimates the capacity that a checked request needs, before its tokenization."""
    prompt = request.prompt
    characters = (
        len(prompt.text)
        + len(prompt.suffix)
        + sum(len(message.content) for message in prompt.chat.messages)
    )
    generated = min(request.stopping.max_tokens or GROWTH_TOKENS, GROWTH_TOKENS)
    num_choices = max(request.n, request.best_of, request.beam_search.width, 1)
    num_prompt = len(prompt.token_ids.ids) + characters // _CHARACTERS_PER_TOKEN
    num_tokens = num_prompt + num_choices * generated
    return Capacity(sequences=1, prompt_tokens=num_prompt, kv_tokens=num_tokens)
