"""Runs a prompt on an engine and explains the run by the API's own values.

Nothing is sampled or timed here that the engine does not report, except the time between tokens,
which is taken when they arrive. One request gives the tokens, their log probabilities and the
timeline. A second one with the same seed gives the log probabilities after temperature and filters.
Further ones compute each token again without KV cache.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

from google.protobuf.json_format import MessageToDict

from ...proto.errors import InternalError
from ...router.client.types import Completion, Delta, Options, TokenLogprobs
from ...workers.model.costs.inference import InferenceCost
from ...workers.model.costs.report import cost_report
from ...workers.model.costs.roofline import Roofline
from ...workers.model.costs.stages import list_stages
from .cost import THIS_MACHINE
from .record import Explanation, Recomputation, Step, Token, TokenCandidate

MAX_REPORTED: Final = 20  # alternatives that the API reports at most

_COUNTING: Final = ("presence_penalty", "frequency_penalty")
"""Options that count the generated tokens."""


class CompletionStream(Protocol):
    """The stream of a Client or of an LLM."""

    def __iter__(self) -> Any: ...

    def completion(self) -> Completion: ...


OpenStream = Callable[[str | Sequence[int], Options], AbstractContextManager[CompletionStream]]
"""Sends a prompt, a text or ids, with options to the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Describes the engine and the device on which a prompt is explained."""

    model: str
    engine: str
    cost: InferenceCost
    roofline: Roofline
    open_stream: OpenStream
    memory: Callable[[], dict[str, int]]  # bytes of the process by name; empty if unknown
    # The power since the last call, by device; empty if unknown.
    watts: Callable[[], dict[str, float]]


def explain(
    subject: Subject, prompt: str, options: Options, *, num_candidates: int, recompute: bool
) -> Explanation:
    """Runs a prompt and returns its explanation. Raises the errors of the engine.

    `options` must have a seed and at least one token.
    """
    subject.watts()  # begins the measurement
    completion, arrivals = _run(subject, prompt, {**options, "logprobs": MAX_REPORTED})
    drawn, _ = _run(
        subject, prompt, {**options, "logprobs": MAX_REPORTED, "processed_logprobs": True}
    )
    # Last: with prefix caching its blocks would be a hit of the first request.
    scored, _ = _run(subject, prompt, {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 0.0})
    ids = [each.token.token_id for each in scored.prompt_logprobs]
    recomputation, note = _recompute(subject, ids, completion, options) if recompute else (None, "")
    config = subject.cost.config
    timeline = completion.timeline
    report = cost_report(
        subject.model,
        subject.cost,
        prompt_tokens=len(ids),
        output_tokens=len(completion.token_ids),
        devices={THIS_MACHINE: subject.roofline},
    )
    return Explanation(
        model=subject.model,
        engine=subject.engine,
        prompt=prompt,
        prompt_tokens=tuple(
            Token(token_id=each.token.token_id, text=each.token.text)
            for each in scored.prompt_logprobs
        ),
        parameters=dict(options),
        stages=list_stages(config, len(ids)),
        cost=report,
        steps=_steps(subject, len(ids), completion, drawn, arrivals, num_candidates),
        text=completion.text,
        finish_reason=completion.finish_reason,
        stopped_because=_reason(completion, options),
        timeline=MessageToDict(timeline, preserving_proto_field_name=True),
        tokens_per_second=_rate(len(completion.token_ids), timeline.end_to_end_seconds),
        recomputation=recomputation,
        recomputation_note=note,
        memory={
            "weights": report.weight_bytes,
            "kv_cache": report.kv_bytes,
            **subject.memory(),
        },
        watts=subject.watts(),
    )


def _run(
    subject: Subject, prompt: str | Sequence[int], options: dict[str, Any]
) -> tuple[Completion, list[float]]:
    """Returns the completion and the time at which each of its tokens arrived."""
    arrivals: list[float] = []
    with subject.open_stream(prompt, cast(Options, options)) as stream:
        for delta in stream:
            now = time.perf_counter()
            arrivals += [now for _ in cast(Delta, delta).token_ids]
        completion = stream.completion()
    if not completion.token_ids:
        raise InternalError("the engine generated no token")
    return completion, arrivals


def _steps(
    subject: Subject,
    num_prompt: int,
    completion: Completion,
    drawn: Completion,
    arrivals: Sequence[float],
    num_candidates: int,
) -> tuple[Step, ...]:
    steps = []
    is_equal = True  # the second run drew the same tokens so far
    for number, (token, scores) in enumerate(
        zip(completion.token_ids, completion.logprobs, strict=True)
    ):
        work = subject.cost.decode(num_prompt + number)
        seconds = arrivals[number] - arrivals[number - 1] if number else 0.0
        if number == 0:
            work = subject.cost.prefill(num_prompt, completion.usage.cached_tokens)
            seconds = completion.timeline.prefill_seconds
        after = drawn.logprobs[number] if is_equal and number < len(drawn.logprobs) else None
        is_equal = is_equal and drawn.token_ids[number : number + 1] == (token,)
        steps.append(
            Step(
                token_id=token,
                text=scores.token.text,
                rank=scores.token.rank,
                probability=math.exp(scores.token.logprob or 0.0),
                drawn_probability=_drawn(after, token),
                candidates=tuple(
                    TokenCandidate(
                        token_id=each.token_id,
                        text=each.text,
                        probability=math.exp(each.logprob or 0.0),
                        drawn_probability=_drawn(after, each.token_id),
                    )
                    for each in scores.top[:num_candidates]
                ),
                context=num_prompt + number,
                kv_bytes=subject.cost.kv_bytes(num_prompt + number),
                flops=work.flops,
                num_bytes=work.num_bytes,
                seconds=seconds,
                floor_seconds=subject.roofline.seconds(work),
                bound=subject.roofline.bound(work),
            )
        )
    return tuple(steps)


def _drawn(after: TokenLogprobs | None, token_id: int) -> float | None:
    """Returns a token's probability in the distribution that was drawn from; None: unknown."""
    if after is None:
        return None
    for each in (after.token, *after.top):
        if each.token_id == token_id and each.logprob is not None:
            return math.exp(each.logprob)
    least = after.top[-1].logprob if after.top else None
    # The list goes on to excluded tokens, so it has every token that could be drawn.
    return 0.0 if least == -math.inf else None


def _reason(completion: Completion, options: Options) -> str:
    """Returns in words why the generation stopped."""
    choice = completion.choices[0]
    if choice.stop_string:
        return f"the text reached the stop string {choice.stop_string!r}"
    if choice.finish_reason == "stop":
        return f"the end-of-sequence or stop token {choice.token_ids[-1]} was drawn"
    if choice.finish_reason == "length":
        most = options.get("max_tokens")
        if most == len(choice.token_ids):
            return f"max_tokens, {most}, was reached"
        return "the context of the model is full"
    return f"finish reason {choice.finish_reason}"


def _recompute(
    subject: Subject, prompt_ids: Sequence[int], completion: Completion, options: Options
) -> tuple[Recomputation | None, str]:
    """Computes each token by a prefill of all tokens before it, with the same seed.

    If nothing can be said, returns the reason instead: the engine has reused KV cache, or the
    options count generated tokens, which are part of the prompt here.
    """
    if any(options.get(name) for name in _COUNTING):
        return None, f"not measured: {' and '.join(_COUNTING)} do not count tokens of a prompt"
    ids = completion.token_ids
    least = options.get("min_tokens", 0)
    seconds: list[float] = []
    found: list[int] = []
    for number in range(len(ids)):
        once = {**options, "max_tokens": 1, "min_tokens": int(number < least)}
        again, _ = _run(subject, [*prompt_ids, *ids[:number]], once)
        if again.usage.cached_tokens:
            return None, "not measured: the service reuses the KV cache of equal prefixes"
        seconds.append(again.timeline.end_to_end_seconds)
        found += again.token_ids[:1]
    different = sum(one != other for one, other in zip(ids, found, strict=True))
    return (
        Recomputation(seconds=tuple(seconds), total_seconds=sum(seconds), num_different=different),
        "",
    )


def _rate(num_tokens: int, seconds: float) -> float:
    return num_tokens / seconds if seconds else 0.0
