"""Defines the options of requests and the results of both clients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from ...proto import inference_pb2

Timeline = inference_pb2.Timeline
Usage = inference_pb2.Usage
"""Tokens of one request, all choices together."""

ToolCall = inference_pb2.ToolCall
"""A call that the model requests; the message with its result has its `id` as `tool_call_id`."""

ModelInfo = inference_pb2.Model
"""A model that the service serves."""

WatermarkEvidence = inference_pb2.DetectWatermarkResponse
"""What the test for a watermark has found: `z`, `p`, `num_tokens` and `num_green`."""

FinishReason = Literal["stop", "length", "tool_calls", "time", "repetition"]
Message = Mapping[str, object]
"""A message of a chat: `role` and `content`, and where they apply `name`, `reasoning`, `tool_calls`
and `tool_call_id`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Describes a function that the model may ask the caller to call."""

    name: str
    description: str = ""
    # A JSON schema of the arguments; empty for a function without arguments.
    parameters: Mapping[str, object] = field(default_factory=dict)


class TemplateOptions(TypedDict, total=False):
    """Declares how the messages of a chat become a prompt."""

    tools: Sequence[Tool | Mapping[str, object]]  # mappings in OpenAI's form
    tool_choice: str  # "auto", "none", "required" or a tool's name; absent: "auto"
    template_kwargs: Mapping[str, object]  # further variables of the chat template
    continue_final_message: bool  # continues the last message, which is the assistant's
    parse_special: bool  # reads special tokens that messages spell as tokens, not as text


class Options(TypedDict, total=False):
    """Declares the rows of proto/parameters.py with types.

    An absent option takes the service's default.
    """

    model: str  # absent: the only model served
    request_id: str  # names the request in logs and timelines
    priority: int  # of waiting requests the greatest goes first
    service_tier: str  # the SLO class, one of the service's configuration
    truncate_prompt: bool  # keeps the end of a prompt that does not fit the context
    # The number of tokens to keep of the prompt's end; -1: as many as fit the context.
    truncate_prompt_tokens: int
    # Requests with one key go to one worker, if that does not take much longer.
    prompt_cache_key: str
    prompt_cache_retention: str  # keeps the prompt in the prefix cache: 5m, 30m, 1h, 12h or 24h
    truncation: str  # auto: drops the oldest turns of a chat that does not fit the context

    n: int  # completions; choice i is sampled like a separate request with seed + i
    best_of: int  # completions to generate; the n likeliest are returned
    beam_width: int  # searches instead of sampling; excludes the options of the next block
    length_penalty: float  # of the beam search; absent: 1
    early_stopping: bool  # ends the beam search when beam_width hypotheses are complete

    # 0 is greedy. Absent: the value of the model's generation_config.json, or else 1. The same
    # holds for other options where docs/parameters.md says so.
    temperature: float
    top_k: int  # 0 keeps all
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float  # of tokens in prompt or completion; absent: 1
    presence_penalty: float  # of tokens in the completion
    frequency_penalty: float  # of tokens in the completion, for each occurrence
    logit_bias: Mapping[int, float]  # numbers that are added to logits, by token id
    # Texts to avoid: their token sequences, with and without a space before, are never completed;
    # another tokenization of the text is possible.
    bad_words: Sequence[str]
    watermark: (
        bool  # marks the text, for a service that has a key; see docs/operations/watermark.md
    )
    seed: int  # same seed, same tokens; absent: a random one

    max_tokens: int  # absent: for a chat up to the end of the context, for another prompt 16
    min_tokens: int  # before this number of tokens nothing ends a completion
    stop: str | Sequence[str]  # the text ends before the first of these
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    max_time_ms: int  # after the request's arrival; then it ends with the output so far
    stop_regex: str  # the text ends before its first match
    # A completion ends when its last n-gram has occurred this number of times in a row.
    repetition_stop_ngram: int  # tokens of the n-gram
    repetition_stop_count: int

    # Reports the log probability of each generated token and of this number of alternatives;
    # absent: reports no log probabilities.
    logprobs: int
    prompt_logprobs: int  # the same for the prompt; max_tokens may then be 0
    processed_logprobs: bool  # `logprobs` of the distribution that tokens are drawn from
    echo: bool  # repeats the prompt before each completion; not in a chat

    # The form of the completion: at most one of these five.
    json_schema: Mapping[str, object] | str
    json_object: bool
    regex: str
    choice: Sequence[str]  # the completion is one of these texts
    grammar: str  # in llguidance's Lark, or in GBNF


class ChatOptions(Options, TemplateOptions, total=False):
    """Declares the options of a chat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """Holds a token and its log probability under the model's own distribution."""

    token_id: int
    token_bytes: bytes  # several tokens may make one character
    logprob: float | None  # natural logarithm; None for the first token of a prompt
    # in the order of the vocabulary, from 1 for the likeliest; 0 for the first token of a prompt
    rank: int = 0

    @property
    def text(self) -> str:
        """Returns the bytes as text, with replacement characters for parts of characters."""
        return self.token_bytes.decode(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Holds one token of a text and its alternatives."""

    token: Logprob
    top: tuple[Logprob, ...]  # the likeliest first; the token itself may be among them


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Holds a piece of a completion; pieces of several choices come in the order of generation."""

    text: str  # whole characters; empty while they are incomplete
    token_ids: tuple[int, ...]
    first_index: int  # of token_ids[0] among the choice's generated tokens
    finish_reason: FinishReason | None  # set in the choice's last piece only
    usage: Usage | None  # set in the very last piece only
    choice: int = 0  # the index of the choice
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of token_ids, if asked for
    # One for each token of the prompt, in the first piece.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()  # complete calls; their text is not in `text`
    score: float = 0.0  # in the choice's last piece after a beam search
    reasoning: str = ""  # the model's reasoning before its answer in a chat; not in `text`
    # In the choice's last piece: the stop string, or the text matched by stop_regex, that ended it.
    stop_string: str = ""
    stop_token_id: int | None = None  # in the choice's last piece: of stop_token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Holds one of the completions of a prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of token_ids, if asked for
    tool_calls: tuple[ToolCall, ...] = ()
    score: float = 0.0  # of a beam search
    reasoning: str = ""  # the model's reasoning before its answer in a chat; not in `text`
    stop_string: str = ""  # the stop string, or the text matched by stop_regex, that ended it
    stop_token_id: int | None = None  # the one of stop_token_ids that ended it

    @property
    def stop_reason(self) -> str | int | None:
        """Returns vLLM's stop reason: the stop string, the match or the stop token; else None."""
        return self.stop_string or self.stop_token_id

    @property
    def message(self) -> dict[str, object]:
        """Returns the choice as the assistant's message, to continue the chat."""
        message: dict[str, object] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Holds the complete answer to a request; its properties describe the first choice."""

    request_id: str
    choices: tuple[Choice, ...]  # after best_of above n and beam search the best one first
    usage: Usage
    timeline: Timeline  # the time of each part
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # one for each prompt token, if asked for

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        return self.choices[0].logprobs

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.choices[0].tool_calls

    @property
    def message(self) -> dict[str, object]:
        return self.choices[0].message
