"""Runs a model in the caller's own process: no Ray, no server, no port.

    from tandem import LLM, SamplingParams

    with LLM("smollm2-135m-instruct") as llm:
        params = SamplingParams(max_tokens=8, temperature=0)
        for output in llm.generate(["The capital of France is"], params):
            print(output.prompt, output.outputs[0].text)

The engine, the parameters, their bounds and the tokens are the same as in a service. Errors are
those in `tandem.errors`, and for a model that cannot be served CheckpointError, a ValueError. torch
is imported when an LLM is made. One file because the methods share the engine's thread and event
loop.
"""

import asyncio
import gc
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Self, TypedDict, Unpack, cast

from ...proto import inference_pb2
from ...proto.errors import Cancelled, InvalidArgument, Unavailable
from ...proto.parameters import ROWS
from ...router.api.batches.lines import BatchRequest
from ...router.client.request import chat_prompt, generate_request, text_prompt
from ...router.client.results import Collector
from ...router.client.types import Completion, Delta, Message, Options, TemplateOptions
from ...router.garbage import collections_paused
from ..config import TandemConfig, load_config
from ..eval.gather import map_concurrently
from ..eval.perplexity import measure_perplexity
from ..settings import NULL, has_no_effect, local_keys
from ..tables import progress_bar
from .batch import PATIENCE_SECONDS, BatchAnswer, BatchCounts, BatchOutput, answer_requests
from .environment import SPINNING
from .loop_thread import CLOSED, LoopThread
from .lora import LoRARequest
from .outputs import RequestOutput

if TYPE_CHECKING:
    from ...router.frontend.prepared import PreparedRequest
    from .engine import LocalEngine

PromptText = str | Mapping[str, Any]
"""A text, or as in vLLM {"prompt": text} or {"prompt_token_ids": ids}; ids have precedence."""

Prompts = PromptText | Sequence[PromptText]
TokenIds = Sequence[int] | Sequence[Sequence[int]]
Parameters = Options | Sequence[Options] | None
"""Sampling parameters: the same for all prompts, or one for each; None means the defaults."""

_CLOSED: Final = "another thread has closed the stream"
_CHUNK_TOKENS: Final = 512
"""Prompt tokens in a step with decodes: larger than in a service, for offline throughput."""

for _name, _value in SPINNING.items():
    # Before torch is imported: its threads read the environment once.
    os.environ.setdefault(_name, _value)

_LOOK_AHEAD: Final = 2
"""Concurrent requests for each sequence that the engine can run."""


class LocalSettings(TypedDict, total=False):
    """Holds the settings of an LLM, by vLLM's names where it has them; see cluster/settings.py."""

    tensor_parallel_size: int  # processes of this machine that share the model
    dtype: str  # float32, bfloat16 or float16
    quantization: str | None  # of the weights when they are loaded: int8, int4 or fp8
    kv_cache_dtype: str  # auto (dtype), int8, fp8, or int4 (CPUs)
    # As in vLLM, such as {"method": "ngram", "num_speculative_tokens": 5}.
    speculative_config: Mapping[str, object] | None
    device: str  # cpu or cuda
    max_model_len: int | None  # the longest prompt plus completion; None is the model's own
    max_num_seqs: int | None  # in one batch; None is 256, on CPUs 64
    gpu_memory_utilization: float  # the part of its GPU's memory that each process may use
    kv_cache_gb: float | None  # GiB of each process; None is the rest of that part
    kv_host_gb: float  # GiB of host memory of each process, for blocks that leave the KV cache
    state_slots: int | None  # of a model that keeps states; None is at most half of that cache
    kv_disk: str | None  # a folder that keeps KV cache beyond the process
    kv_disk_gb: float  # GiB of that folder
    block_size: int  # tokens
    enable_prefix_caching: bool
    num_threads: int | None  # of each process; None shares the cores
    numerics: str  # exact or fast, as in the configuration of a service
    # In place of the model's: a file, the template itself, or a name as of `--chat-template`.
    chat_template: str | os.PathLike[str] | None
    watermark_key: str | os.PathLike[str] | None  # a file of `tandem watermark key`
    generation_config: str  # auto: parameters that are absent are the model's own; or none
    override_generation_config: Mapping[str, float]  # wins over the model's own
    # Variables of the chat template that a call does not set.
    default_chat_template_kwargs: Mapping[str, object]
    served_model_name: str | None  # the name of the model in the requests of a batch
    max_loras: int  # held at once
    max_lora_rank: int


class LLM:
    """Generates with a model in this process. Thread-safe; must be closed, or used in `with`.

    All prompts of a call share one batch; sequences join it at their start and leave it at their
    end.
    """

    def __init__(self, model: str, **settings: Unpack[LocalSettings]) -> None:
        """Loads `model`: a built-in name, a folder, a GGUF file or a hub id, as for `tandem serve`.

        A setting that is absent has the default of the configuration of a service.

        Raises TypeError for an unknown setting, InvalidArgument for a wrong value and for a setting
        that only vLLM has, CheckpointError (a ValueError) for a model that cannot be served, and
        the other errors of `resolve_model` for a model that cannot be fetched.
        """
        given = cast(
            LocalSettings,
            {
                name: value
                for name, value in settings.items()
                if not has_no_effect(name, value, f"{name}={value!r}")
            },
        )
        keys = local_keys(given)
        for name in given:
            if name not in LocalSettings.__annotations__:
                raise TypeError(f"LLM() got an unexpected keyword argument {name!r}")
        with _naming_arguments(keys), collections_paused():
            self._loop, engine = _start(_configure(model, given, keys))
        self._running: LocalEngine | None = engine
        self._stop = weakref.finalize(self, _stop_collected, self._loop, engine)

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: Parameters = None,
        *,
        prompt_token_ids: TokenIds | None = None,
        progress: bool = True,
        use_tqdm: bool | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[RequestOutput]:
        """Continues texts or token ids; returns the outputs in the order of the prompts.

        `lora_request` names an adapter. `progress`, in vLLM `use_tqdm`, shows a bar on a terminal
        and in notebooks. All prompts are checked before any runs: InvalidArgument names the wrong
        one, as `prompts[3]`.
        """
        if (prompts is None) == (prompt_token_ids is None):
            raise InvalidArgument("give either prompts or prompt_token_ids", "prompts")
        given: Any = prompts if prompt_token_ids is None else prompt_token_ids
        if isinstance(given, str | Mapping) or (len(given) > 0 and isinstance(given[0], int)):
            given = [given]
        name = "prompts" if prompt_token_ids is None else "prompt_token_ids"
        texts = []
        made = []
        for i, each in enumerate(given):
            with _naming_prompt(name, i):
                text, prompt = _read_prompt(each)
            texts.append(text)
            made.append(prompt)
        shown = progress if use_tqdm is None else use_tqdm
        return self._complete(name, made, sampling_params, shown, lora_request, texts)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Parameters = None,
        *,
        progress: bool = True,
        use_tqdm: bool | None = None,
        lora_request: LoRARequest | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        add_generation_prompt: bool | None = None,
        **options: Unpack[TemplateOptions],
    ) -> list[RequestOutput]:
        """Answers one conversation or several; otherwise like `generate`.

        `options`: tools, tool_choice, template_kwargs, continue_final_message, parse_special. vLLM
        calls template_kwargs `chat_template_kwargs`, and needs `add_generation_prompt` False to
        continue the final message.
        """
        if chat_template_kwargs is not None:
            if "template_kwargs" in options:
                raise InvalidArgument("is another name of template_kwargs", "chat_template_kwargs")
            options["template_kwargs"] = chat_template_kwargs
        if add_generation_prompt is bool(options.get("continue_final_message")):
            reason = "must be False if and only if continue_final_message is True"
            raise InvalidArgument(reason, "add_generation_prompt")
        if unknown := options.keys() - TemplateOptions.__annotations__.keys():
            raise InvalidArgument("there is no such option here", min(unknown))
        chats: Any = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        made = []
        for i, chat in enumerate(chats):
            with _naming_prompt("messages", i):
                made.append(chat_prompt(chat, options))
        shown = progress if use_tqdm is None else use_tqdm
        return self._complete("messages", made, sampling_params, shown, lora_request)

    def stream(
        self, prompt: str | Sequence[int], sampling_params: Options | None = None
    ) -> "LocalStream":
        """Continues a text or token ids; the result yields pieces, and `close` ends it early."""
        with _naming_prompt("prompt"):
            request = generate_request(text_prompt(prompt), sampling_params or Options())
            prepared = self._loop.run(self._engine.prepare(request))
        return LocalStream(self, prepared)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: Options | None = None,
        **options: Unpack[TemplateOptions],
    ) -> "LocalStream":
        """Answers a conversation piece by piece, like `stream`."""
        with _naming_prompt("messages"):
            request = generate_request(chat_prompt(messages, options), sampling_params or Options())
            prepared = self._loop.run(self._engine.prepare(request))
        return LocalStream(self, prepared)

    def perplexity(
        self,
        texts: str | Sequence[str],
        *,
        window: int | None = None,
        stride: int | None = None,
        progress: bool = True,
    ) -> list[float]:
        """Returns the perplexity of each text, in overlapping windows.

        The windows are those of `tandem eval perplexity`: `window` tokens, by default the context
        less one, and `stride` tokens apart, by default half a window.
        """
        listed = [texts] if isinstance(texts, str) else texts
        engine = self._engine

        async def measure(text: str) -> float:
            found = await measure_perplexity(engine, text, window=window, stride=stride)
            update(advance=1)
            return found.perplexity

        with progress_bar("texts", len(listed), shown=progress) as update:
            return self._loop.run(map_concurrently(measure, listed, engine.max_sequences))

    def answer_batch(
        self, requests: Sequence[BatchRequest], output: BatchOutput, *, progress: bool = True
    ) -> BatchCounts:
        """Answers the requests of a batch that have no answer in `output`, as `tandem batch`.

        Grammars are checked one after another, so the engine may refuse a request as busy. It is
        then sent again, for at most PATIENCE_SECONDS.
        """
        from .batch_senders import engine_sender

        engine = self._engine
        send = engine_sender(engine.service)

        async def send_unless_failed(request: BatchRequest) -> BatchAnswer:
            engine.check_failed()  # otherwise the request would be sent again for a long time
            return await send(request)

        with progress_bar("requests", len(requests), shown=progress) as update:
            update(advance=len(output.answered))
            work = answer_requests(
                requests,
                output,
                send_unless_failed,
                concurrency=_LOOK_AHEAD * engine.max_sequences,
                patience_seconds=PATIENCE_SECONDS,
                on_answer=lambda: update(advance=1),
            )
            return self._loop.run(work)

    def get_default_sampling_params(self) -> Options:
        """Returns the defaults of parameters that the model or an argument of this LLM sets."""
        defaults = self._engine.defaults
        return cast(Options, {ROWS[field].client_name: defaults[field] for field in defaults})

    def close(self) -> None:
        """Ends all requests and frees the model, its processes and its memory. Idempotent."""
        running, self._running = self._running, None
        if running is not None and self._stop.detach():
            _stop(self._loop, running)
        del running
        gc.collect()  # the parts of an engine refer to each other
        if (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # other processes may take it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def _engine(self) -> "LocalEngine":
        if self._running is None:
            raise Unavailable(CLOSED)
        return self._running

    def _complete(
        self,
        name: str,
        prompts: Sequence[inference_pb2.Prompt],
        parameters: Parameters,
        progress: bool,
        lora_request: LoRARequest | None,
        texts: Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts; `name` is the argument that has them."""
        if isinstance(parameters, Sequence):
            given = parameters
        else:
            given = [parameters or Options()] * len(prompts)
        if len(given) != len(prompts):
            raise InvalidArgument(
                f"has {len(given)} entries; it must have one for each of {len(prompts)} prompts",
                "sampling_params",
            )
        if lora_request is not None:
            model = self._loop.run(self._engine.use_adapter(lora_request))
            given = [Options(**(each | {"model": model})) for each in given]
        with progress_bar(name, len(prompts), shown=progress) as update:
            work = _answer(self._engine, name, prompts, given, lambda: update(advance=1))
            completed = self._loop.run(work)
        return [
            RequestOutput.from_completion(
                completion,
                None if texts is None else texts[i],
                request.tokens.submit.token_ids,
                has_logprobs=request.wants_logprobs,
            )
            for i, (request, completion) in enumerate(completed)
        ]


class LocalStream:
    """Iterates over the deltas of a completion. Leaving the block early cancels the request."""

    def __init__(self, llm: LLM, request: "PreparedRequest") -> None:
        self._llm = llm  # lives as long as its streams
        self._loop = llm._loop
        self._collector = Collector()
        self._timeline = inference_pb2.Timeline()
        self._messages = llm._engine.messages(request, self._timeline)
        self._reading: asyncio.Task[object] | None = None
        self._closed_by: int | None = None  # the thread that has closed the stream

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        """Waits for the next delta; raises Cancelled if another thread closes the stream."""
        message = self._loop.run(self._next())
        if message is not None:
            return self._collector.delta(message)
        if self._closed_by not in (None, threading.get_ident()) and not self._collector.is_complete:
            raise Cancelled(_CLOSED)
        raise StopIteration

    def completion(self) -> Completion:
        """Reads the rest of the stream; returns the completion."""
        for _ in self:
            pass
        self._collector.timeline = self._timeline
        return self._collector.completion()

    def close(self) -> None:
        """Ends the request, unless it has ended. Idempotent; any thread may call it."""
        if self._closed_by is None:
            self._closed_by = threading.get_ident()
        with suppress(Unavailable):  # the engine is closed, which has ended its requests
            self._loop.run(self._end())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    async def _next(self) -> inference_pb2.GenerateResponse | None:
        self._reading = asyncio.current_task()
        try:
            return await anext(self._messages, None)
        except asyncio.CancelledError:
            if self._closed_by is not None:
                raise Cancelled(_CLOSED) from None
            raise
        finally:
            self._reading = None

    async def _end(self) -> None:
        if self._reading is not None:  # by another thread; a running generator cannot be closed
            self._reading.cancel()
            await asyncio.wait([self._reading])
        await self._messages.aclose()


def _configure(model: str, settings: LocalSettings, keys: Mapping[str, str]) -> TandemConfig:
    """Returns the configuration of a service with one worker that fetches from no other.

    Raises InvalidArgument.
    """
    values: dict[str, object] = {"model": model}
    values |= {
        keys[name]: dict(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
    }
    for name in ("chat_template", "watermark.key_file"):
        if isinstance(given := values.get(name), os.PathLike):
            values[name] = os.fspath(given)
    values["prefill.replicas"] = 0
    values["kv_transports"] = ()
    values["decode.mixed_chunk_tokens"] = _CHUNK_TOKENS
    values["decode.mixed_step_factor"] = NULL  # nobody waits for single tokens
    # No other worker could take over, and other programs here may need the cores.
    values["hang_seconds"] = 120.0
    return load_config(overrides=values)


def _start(config: TandemConfig) -> "tuple[LoopThread, LocalEngine]":
    from ..store.checked import checked_folder, with_draft_folder

    config = with_draft_folder(config)
    folder = checked_folder(config)
    from .engine import LocalEngine  # with torch and transformers, which take seconds

    loop = LoopThread("tandem-llm")
    try:
        return loop, loop.run(LocalEngine.start(config, folder))
    except ValueError as error:
        loop.stop()
        raise InvalidArgument(str(error)) from None
    except BaseException:
        loop.stop()
        raise


def _stop(loop: LoopThread, engine: "LocalEngine") -> None:
    if loop.is_inherited:  # the engine is that of another process
        return
    try:
        loop.run(engine.close())
    finally:
        loop.stop()


def _stop_collected(loop: LoopThread, engine: "LocalEngine") -> None:
    """Stops the engine of an LLM that was collected without `close`.

    Any thread may collect it, also the engine's own.
    """
    if threading.current_thread() is threading.main_thread():
        _stop(loop, engine)
    else:
        threading.Thread(target=_stop, args=(loop, engine), name="tandem-stop").start()


async def _answer(
    engine: "LocalEngine",
    name: str,
    prompts: Sequence[inference_pb2.Prompt],
    parameters: Sequence[Options],
    on_done: Callable[[], None],
) -> "list[tuple[PreparedRequest, Completion]]":
    """Checks all prompts, then completes them; `name` is the argument that has them."""
    prepared = []
    for i, prompt in enumerate(prompts):
        with _naming_prompt(name, i):
            prepared.append(await engine.prepare(generate_request(prompt, parameters[i])))
        # Lets streams and running requests go on: the checks of short prompts never wait.
        await asyncio.sleep(0)

    async def complete(
        numbered: "tuple[int, PreparedRequest]",
    ) -> "tuple[PreparedRequest, Completion]":
        i, request = numbered
        with _naming_prompt(name, i):
            completion = await engine.complete(request)
        on_done()
        return request, completion

    return await map_concurrently(complete, enumerate(prepared), _LOOK_AHEAD * engine.max_sequences)


@contextmanager
def _naming_arguments(keys: Mapping[str, str]) -> Iterator[None]:
    """Makes errors name the arguments, which are the names in `keys`, instead of the keys."""
    try:
        yield
    except InvalidArgument as error:
        text = str(error)
        for argument, key in keys.items():
            text = re.sub(rf"^{re.escape(key)}(?=[:.])", argument, text, flags=re.MULTILINE)
        field, _, message = text.partition(": ")
        raise InvalidArgument(message, field) from None


@contextmanager
def _naming_prompt(name: str, index: int | None = None) -> Iterator[None]:
    """Makes an error name the prompt that it is about; `index`: None for a single prompt."""
    try:
        yield
    except InvalidArgument as error:
        field = name if index is None else f"{name}[{index}]"
        if not re.match(r"prompt\b", error.field):  # a parameter, such as prompt_logprobs
            field = error.field if index is None else f"{field}, {error.field}"
        raise InvalidArgument(error.message.removeprefix(f"{error.field}: "), field) from error


def _read_prompt(given: Any) -> tuple[str | None, inference_pb2.Prompt]:
    """Converts a prompt of any form; returns its text, or None for token ids, and its message."""
    if isinstance(given, Mapping):
        ids = given.get("prompt_token_ids")
        given = given.get("prompt") if ids is None else ids
        if given is None:
            raise InvalidArgument("needs prompt or prompt_token_ids", "prompt")
    return given if isinstance(given, str) else None, text_prompt(given)
