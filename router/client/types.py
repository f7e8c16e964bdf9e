"""Defines the options of requests and the results of both clients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from ...proto import inference_pb2

Timeline = inference_pb2.Timeline
Usage = inference_pb2.Usage
"""Tokens of one request, all choices together."""

ToolCall = inference_pb2.ToolCall
"""What the model asks for; the message with the result names its `id` as `tool_call_id`."""

ModelInfo = inference_pb2.Model
"""A model that the service answers for."""

FinishReason = Literal["stop", "length", "tool_calls"]
Message = Mapping[str, object]
"""A message of a chat: `role` and `content`, and where they apply `name`, `reasoning`, `tool_calls`
and `tool_call_id`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Describes a function that the model may ask the caller to call."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] = field(
        default_factory=dict
    )  # JSON schema of the arguments; empty: none


class TemplateOptions(TypedDict, total=False):
    """Declares how the messages of a chat become a prompt."""

    tools: Sequence[Tool | Mapping[str, object]]  # mappings in OpenAI's form
    tool_choice: str  # "auto", "none", "required" or a tool's name; absent: "auto"
    template_kwargs: Mapping[str, object]  # further variables of the chat template
    continue_final_message: bool  # goes on with the last message, the assistant's
    parse_special: bool  # special tokens that messages spell are no text


class Options(TypedDict, total=False):
    """Declares the rows of proto/parameters.py with types; what is absent takes the service's
    default.
    """

    model: str  # absent: the only model served
    request_id: str  # names the request in logs and timelines
    priority: int  # of those that wait the greatest goes first
    truncate_prompt: bool  # keeps the end of a prompt that does not fit the context
    truncate_prompt_tokens: (
        int  # keeps so many tokens of the prompt's end; -1: as many as fit the context
    )

    n: int  # completions; choice i samples as a request of its own with seed + i would
    best_of: int  # completions to generate, of which the n likeliest are answered
    beam_width: int  # searches instead of sampling; goes with no option of the block below
    length_penalty: float  # of the beam search; absent: 1
    early_stopping: bool  # of the beam search: as soon as beam_width hypotheses are complete

    # 0 is greedy; absent: the model's, or else 1; the same holds where docs/parameters.md says so
    temperature: float
    top_k: int  # 0 keeps all
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float  # of tokens in prompt or completion; absent: 1
    presence_penalty: float  # of tokens in the completion
    frequency_penalty: float  # the same, for each time
    logit_bias: Mapping[int, float]  # token id: what is added to its logit
    bad_words: Sequence[str]  # texts that the completion will not have
    seed: int  # same seed, same tokens; absent: a random one

    max_tokens: int  # absent: of a chat to the end of the context, of another prompt 16
    min_tokens: int  # before so many nothing ends a completion
    stop: str | Sequence[str]  # the text ends before the first of these
    stop_token_ids: Sequence[int]
    ignore_eos: bool

    logprobs: (
        int  # reports each generated token's log probability and so many alternatives; absent: none
    )
    prompt_logprobs: int  # the same for the prompt; max_tokens may then be 0
    echo: bool  # repeats the prompt before each completion; not in a chat

    json_schema: (
        Mapping[str, object] | str
    )  # of these five at most one: what the completion looks like
    json_object: bool
    regex: str
    choice: Sequence[str]  # one of these texts, word for word
    grammar: str  # in the Lark format of llguidance


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
        """The bytes as text, with replacement characters for parts of characters."""
        return self.token_bytes.decode(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Holds one token of a text and its alternatives."""

    token: Logprob
    top: tuple[Logprob, ...]  # the likeliest first; the token itself may be among them


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Holds a piece of a completion; those of several choices come as they are generated."""

    text: str  # whole characters; empty while they are incomplete
    token_ids: tuple[int, ...]
    first_index: int  # of token_ids[0] among the choice's generated tokens
    finish_reason: FinishReason | None  # set in the choice's last piece only
    usage: Usage | None  # set in the very last piece only
    choice: int = 0  # the index of the choice
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of token_ids, if asked for
    prompt_logprobs: tuple[
        TokenLogprobs, ...
    ] = ()  # one for each token of the prompt, in the first piece
    tool_calls: tuple[ToolCall, ...] = ()  # whole ones; their text is not in `text`
    score: float = 0.0  # in the choice's last piece after a beam search
    reasoning: str = ""  # what the model thinks before it speaks, in a chat; not in `text`
    stop_string: str = ""  # in the choice's last piece: the stop string that has ended it


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Holds one of the completions of a prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of token_ids, if asked for
    tool_calls: tuple[ToolCall, ...] = ()
    score: float = 0.0  # of a beam search
    reasoning: str = ""  # what the model thought before it spoke, in a chat; not in `text`
    stop_string: str = ""  # that has ended it

    @property
    def message(self) -> dict[str, object]:
        """The choice as the assistant's message, for the chat to go on with."""
        message: dict[str, object] = {"role": "assistant", "content": self.text}
        message |= {"reasoning": self.reasoning} if self.reasoning else {}
        return message | ({"tool_calls": self.tool_calls} if self.tool_calls else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Holds the whole answer to a request; its properties are those of the first choice."""

    request_id: str
    choices: tuple[Choice, ...]  # after best_of and beam search the best first
    usage: Usage
    timeline: Timeline  # where the time went
    prompt_logprobs: tuple[
        TokenLogprobs, ...
    ] = ()  # one for each token of the prompt, if asked for

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
