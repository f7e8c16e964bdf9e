"""Describes a served model, and fits prompts and completions into its context."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from ...proto import inference_pb2
from ...proto.errors import ContextExceeded, InvalidArgument
from ..pooling import PoolingRules
from ..request import LoraAdapter
from ..slo import SloClasses
from ..watermark.rules import WatermarkRules
from .constraint import GrammarValidator
from .tokenizer import Tokenizer
from .validation import most_answer_tokens

_DEFAULT_COMPLETION_TOKENS: Final = 16  # as in OpenAI and vLLM, except for chats


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Holds a model under the name that requests ask for."""

    name: str
    tokenizer: Tokenizer
    context_tokens: int  # the longest prompt plus completion
    # By the configuration or the model, even if workers hold less; None: `context_tokens`.
    configured_tokens: int | None = None
    # The longest that every worker holds, while some hold more; None: `context_tokens`.
    common_tokens: int | None = None
    # The multimodal architecture of which only the text model is loaded; "" for a text model.
    text_model_of: str = ""
    # The model's values of fields that a request does not set, by field.
    defaults: Mapping[str, float] = field(default_factory=dict)
    pooling: PoolingRules = field(default_factory=PoolingRules)
    grammars: GrammarValidator = field(default_factory=GrammarValidator)
    adapter: LoraAdapter | None = None  # added to the weights
    watermark: WatermarkRules | None = None  # None: the service has no key for a watermark
    slo: SloClasses = field(default_factory=dict)  # by name

    def held_by(self, least: int, most: int) -> "ServedModel":
        """Returns the model as served by workers that hold `least` to `most` tokens of a sequence.

        Never exceeds the configured context.
        """
        configured = self.configured_tokens or self.context_tokens
        return replace(
            self,
            context_tokens=min(most, configured),
            configured_tokens=configured,
            common_tokens=min(least, configured),
        )


def reserved_tokens(request: inference_pb2.GenerateRequest, context: int, *, reduces: bool) -> int:
    """Returns the tokens of the context that a prompt should leave for the answer.

    These are max_tokens. If `fit_context` may reduce it, or it is unset, a quarter of the context
    is enough.
    """
    quarter = context // 4
    if not request.stopping.HasField("max_tokens"):
        return max(quarter, 1)
    max_tokens = request.stopping.max_tokens
    return max(min(max_tokens, quarter) if reduces else max_tokens, 1)


def fit_context(
    ids: list[int], request: inference_pb2.GenerateRequest, model: ServedModel, *, reduces: bool
) -> tuple[list[int], int, int]:
    """Makes prompt and completion fit the context; returns prompt, max_tokens and that context.

    A max_tokens of the client is kept or refused. If `reduces`, and the prompt is not to be cut, a
    max_tokens that fits the configured context is reduced to the rest after the prompt. Raises
    ContextExceeded if they do not fit, and InvalidArgument if max_tokens leaves no prompt.
    """
    explicit = request.stopping.max_tokens if request.stopping.HasField("max_tokens") else None
    if request.pooling:
        explicit = 0
    truncates = request.truncate_prompt or request.truncate_prompt_tokens < 0
    reduces = reduces and not truncates
    context = _choose_context(len(ids), request, model, reduces=reduces)
    longest = (model.configured_tokens or context) if reduces else context
    if explicit is not None and explicit > (longest if reduces else longest - 1):
        raise InvalidArgument(
            f"{explicit} leaves no token for the prompt in the context of {longest} tokens",
            "stopping.max_tokens",
        )
    if request.truncate_prompt_tokens > 0:
        ids = ids[-request.truncate_prompt_tokens :]
    least = 1 if reduces else max(explicit or 1, 1)
    if len(ids) + least > context:
        if not truncates:
            generated = 0 if explicit == 0 else least
            raise ContextExceeded(len(ids), generated, context, "prompt")
        ids = ids[least - context :]
    rest = context - len(ids)
    if explicit is None:
        # The size of an answer bounds only what a client asks for itself.
        explicit = min(
            _default_max_tokens(request, model, rest), most_answer_tokens(request, len(ids))
        )
    max_tokens = min(explicit, rest)
    if request.stopping.min_tokens > max_tokens:
        raise InvalidArgument(
            f"must be at most max_tokens, which is {max_tokens}", "stopping.min_tokens"
        )
    return ids, max_tokens, context


def _choose_context(
    num_tokens: int, request: inference_pb2.GenerateRequest, model: ServedModel, *, reduces: bool
) -> int:
    """Returns the context for a prompt of `num_tokens`.

    This is the context of every worker if it is enough: then each of them can take the request.
    """
    common = model.common_tokens
    if (
        common is not None
        and num_tokens + reserved_tokens(request, common, reduces=reduces) <= common
    ):
        return common
    return model.context_tokens


def _default_max_tokens(
    request: inference_pb2.GenerateRequest, model: ServedModel, rest: int
) -> int:
    usual = rest if request.prompt.HasField("chat") else _DEFAULT_COMPLETION_TOKENS
    return min(usual, int(model.defaults.get("stopping.max_tokens", usual)))
