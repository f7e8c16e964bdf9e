"""Answers POST /v1/rerank in the form of Jina, Cohere and vLLM.

A decoder judges a document: the chat template shows it query and document, and the score is the
probability of "yes" against "no" as the next tokens. This is the method and the prompt of
Qwen3-Reranker (arXiv 2506.05176); other models with a chat template may judge less well.
"""

import asyncio
import json
import math
from typing import Annotated, Any, Final

from pydantic import FailFast, Field

from ....proto import inference_pb2, limits
from ....proto.errors import InvalidArgument
from ....proto.parameters import check_count
from ...auth.authenticator import Caller
from ...frontend.prepare import encode_prompt
from ...frontend.served_model import ServedModel
from ...frontend.tokenizer import Tokenizer
from .answers import error_response
from .bodies import WHOLE, Ignored, NestedModel, OpenModel
from .requests import ParsedRequest, prompt_messages
from .writers import AnswerForm, Answers, TokenIds

MAX_DOCUMENTS: Final = limits.MAX_TEXTS // 2
"""Number of documents in one body; each is two prompts."""

_ANSWERS: Final = ("yes", "no")
_SYSTEM: Final = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
_Text = Annotated[str, Field(max_length=limits.MAX_PROMPT_CHARACTERS)]


class RerankDocument(NestedModel):
    text: _Text


class RerankBody(OpenModel):
    """Declares the body of POST /v1/rerank."""

    model: str | None = None
    query: _Text
    documents: Annotated[
        list[_Text | RerankDocument], Field(min_length=1, max_length=MAX_DOCUMENTS), FailFast()
    ]
    top_n: Annotated[int, Field(ge=0), WHOLE] | None = Field(
        None, description="The number of best documents in the answer; 0 or absent: all."
    )
    return_documents: bool | None = Field(
        None, description="If not false, the answer repeats the documents."
    )
    instruction: _Text | None = Field(None, description="The task that the documents are for.")
    user: Ignored[str] = None

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


async def make_rerank_request(
    body: RerankBody, model: ServedModel, request_id: str, caller: Caller
) -> tuple[ParsedRequest[RerankBody], tuple[int, int]]:
    """Makes two prompts of each document: its judgement is yes in the first, no in the second.

    Also returns the numbers of tokens of yes and no. Charges the caller for both prompts of each
    document as soon as it is encoded. Raises InvalidArgument, and Overloaded if the caller has no
    tokens left.
    """
    repeated = len(body.query) + len(body.instruction or "")  # in the prompt of each document
    num_characters = sum(map(len, body.texts)) + repeated * len(body.texts)
    check_count(num_characters, limits.MAX_MESSAGE_BYTES, "characters in all prompts", "documents")
    tokenizer = model.tokenizer
    if not tokenizer.chat_template(tools=False):
        raise InvalidArgument(
            "reranking needs a chat template; serve the model with --chat-template", "model"
        )
    yes, no = await tokenizer.encode_all(
        _ANSWERS, add_special_tokens=False, fairness_id=caller.fairness_id
    )
    prompts: list[list[int]] = []
    num_tokens, most = 0, limits.MAX_SCORED_TOKENS
    for text in body.texts:
        ids = await _encode(body, text, tokenizer, caller)
        caller.quota.take_tokens(len(yes) + len(ids) + len(no))  # `ids` are in two prompts
        num_tokens += len(yes) + 2 * len(ids) + len(no)
        check_count(num_tokens, most, "tokens in all prompts", "documents")
        prompts += [[*ids, *yes], [*ids, *no]]
    common = inference_pb2.GenerateRequest(
        model=body.model or "", prompt_logprobs=0, stopping={"max_tokens": 0}
    )
    request = ParsedRequest(
        body=body,
        common=common,
        prompts=prompt_messages(prompts),
        request_id=request_id,
        names=dict.fromkeys(("prompt", "prompt_logprobs", "logprobs"), "documents"),
        is_streamed=False,
        is_charged=True,
    )
    return request, (len(yes), len(no))


async def _encode(body: RerankBody, text: str, tokenizer: Tokenizer, caller: Caller) -> list[int]:
    """Returns the token ids of the question about a document. Raises as `encode_prompt`.

    An InvalidArgument names the documents: the body has no messages.
    """
    asked = inference_pb2.Prompt(chat=_chat(body, text))
    try:
        return await encode_prompt(asked, tokenizer, caller)
    except InvalidArgument as error:
        message = error.message.removeprefix(f"{error.field}: ")
        raise type(error)(message, "documents") from None


def rerank_form(num_tokens: tuple[int, int]) -> AnswerForm:
    """Returns the form of the answer; `num_tokens`: of yes and no, at the ends of the prompts."""

    async def render_full(
        request: ParsedRequest[RerankBody], model: str, _prompts: TokenIds, answers: Answers
    ) -> bytes:
        return await asyncio.to_thread(_ranked, request, num_tokens, model, answers)

    return AnswerForm(render_full, error_response)


def _chat(body: RerankBody, text: str) -> inference_pb2.Chat:
    chat = inference_pb2.Chat(template_kwargs=json.dumps({"enable_thinking": False}))
    instruction = body.instruction or _INSTRUCTION
    chat.messages.add(role="system", content=_SYSTEM)
    chat.messages.add(
        role="user",
        content=f"<Instruct>: {instruction}\n<Query>: {body.query}\n<Document>: {text}",
    )
    return chat


def _ranked(
    request: ParsedRequest[RerankBody],
    num_tokens: tuple[int, int],
    model: str,
    answers: Answers,
) -> bytes:
    sums = []
    for number, messages in enumerate(answers):
        found = [each.token.logprob for message in messages for each in message.prompt_logprobs]
        sums.append(math.fsum(found[-num_tokens[number % 2] :]))
    scores = [_share(yes, no) for yes, no in zip(sums[::2], sums[1::2], strict=True)]
    texts = request.body.texts
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results: list[dict[str, Any]] = []
    for index in order[: request.body.top_n or None]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if request.body.return_documents is not False:
            result["document"] = {"text": texts[index]}
        results.append(result)
    total = sum(messages[-1].usage.prompt_tokens for messages in answers)
    head = {"id": f"rerank-{request.request_id}", "model": model}
    usage = {"prompt_tokens": total, "total_tokens": total}
    return json.dumps(head | {"usage": usage, "results": results}).encode()


def _share(yes: float, no: float) -> float:
    """Returns the share of yes in the probabilities of yes and no, of which these are the logs."""
    return 1 / (1 + math.exp(min(no - yes, 700.0)))
