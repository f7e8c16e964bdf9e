"""Makes the 16 requests of `tandem demo --kill`: each way to generate is among them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ....router.client.client import AsyncClient, AsyncStream

_TOKENS_PER_ITEM: Final = 15  # of a list in JSON that the demo model writes
_LOG_DAYS: Final = 20  # a prompt of 520 tokens, which takes a prefill worker half a second

_SEEDED_PROMPTS: Final = (
    "Once upon a time, in a village between two rivers, there lived a clockmaker who",
    "The lighthouse keeper wrote in her diary that the storm",
    "A short history of bread begins with",
    "The three things that every sailor should know are",
    "When the last train had left the station, the musicians",
    "Dear friend, you asked me how we built the bridge. First",
)
_LIST_PROMPTS: Final = (
    "Make the shopping list for a dinner with twelve guests, as JSON.",
    "List the tools in a carpenter's workshop, as JSON.",
    "List the plants of a kitchen garden, as JSON.",
)
_TRIP_PROMPTS: Final = (
    "Plan a train journey through Europe for us.",
    "Plan a bicycle tour along a river.",
    "Plan a tour for our choir.",
)
_CHOICES_PROMPTS: Final = ("The best name for a grey cat is", "My favourite season is")
_VESSELS: Final = ("Albatross", "Meridian")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedRequest:
    """Describes one request: its name, which is its request id, and the arguments of the client."""

    name: str
    prompt: str
    options: Mapping[str, Any]
    is_chat: bool = False
    # Starts when a prefill worker is to be killed. Its prompt is long and in no prefix cache.
    starts_late: bool = False

    @property
    def num_choices(self) -> int:
        return int(self.options.get("n", 1))

    def open(self, client: AsyncClient, timeout: float) -> AsyncStream:
        """Sends the request; returns its stream. `timeout`: seconds for all of it."""
        if not self.is_chat:
            return client.stream(self.prompt, timeout=timeout, request_id=self.name, **self.options)
        messages = [{"role": "user", "content": self.prompt}]
        return client.stream_chat(messages, timeout=timeout, request_id=self.name, **self.options)


def mixed_requests(num_tokens: int) -> list[MixedRequest]:
    """Returns the requests, each of about `num_tokens` tokens in each of its choices."""
    text = {"max_tokens": num_tokens, "ignore_eos": True}
    form = {"max_tokens": 4 * num_tokens, "temperature": 0.7}  # the form ends the answer earlier
    num_items = max(num_tokens // _TOKENS_PER_ITEM, 1)
    tool = {"tools": [_plan_trip(num_items)], "tool_choice": "plan_trip"}
    # With log probabilities of the prompt, no part of the prompt comes from a prefix cache.
    scored = text | {"temperature": 0.8, "logprobs": 2, "prompt_logprobs": 0}
    return [
        *_make("seeded", _SEEDED_PROMPTS, text | {"temperature": 0.8, "top_p": 0.95}),
        *_make("json", _LIST_PROMPTS, form | {"json_schema": _list_form(num_items)}, is_chat=True),
        *_make("tools", _TRIP_PROMPTS, form | tool, is_chat=True),
        *_make("n=4", _CHOICES_PROMPTS, text | {"temperature": 1.0, "n": 4}),
        *_make("logprobs", map(_logbook, _VESSELS), scored, starts_late=True),
    ]


def _make(
    kind: str,
    prompts: Iterable[str],
    options: Mapping[str, Any],
    *,
    is_chat: bool = False,
    starts_late: bool = False,
) -> Iterator[MixedRequest]:
    """Yields a request for each prompt, each with a seed of its own."""
    for number, prompt in enumerate(prompts, 1):
        yield MixedRequest(
            name=f"{kind}-{number}",
            prompt=prompt,
            options={"seed": 1000 * number, **options},
            is_chat=is_chat,
            starts_late=starts_late,
        )


def _list_form(num_items: int) -> dict[str, Any]:
    """Returns the JSON schema of an object with a list of exactly so many items."""
    item = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
        },
        "required": ["name", "quantity"],
        "additionalProperties": False,
    }
    return _object_of("items", item, num_items)


def _plan_trip(num_stops: int) -> dict[str, Any]:
    """Returns a tool, in OpenAI's form, whose argument is a list of exactly so many stops."""
    stop = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    function = {
        "name": "plan_trip",
        "description": "Books a trip.",
        "parameters": _object_of("stops", stop, num_stops),
    }
    return {"type": "function", "function": function}


def _object_of(name: str, item: dict[str, Any], num_items: int) -> dict[str, Any]:
    items = {"type": "array", "items": item, "minItems": num_items, "maxItems": num_items}
    return {
        "type": "object",
        "properties": {name: items},
        "required": [name],
        "additionalProperties": False,
    }


def _logbook(vessel: str) -> str:
    """Returns a long text, which differs between vessels from its beginning."""
    days = " ".join(
        f"Day {day}: she sailed {7 * day % 90} miles, and the captain wrote down the wind, the "
        "depth and the course."
        for day in range(1, _LOG_DAYS + 1)
    )
    return f"{vessel} left the harbour. {days} The voyage of the {vessel}"
