"""What a worker makes of a submit: every field at its bound is taken, one past it refused with the
field named.
"""

from typing import Any

import pytest

from tandem.proto import inference_pb2, worker_pb2
from tandem.proto.errors import InvalidArgument, Unavailable
from tandem.tests.watermarks import MESSAGE, WATERMARK
from tandem.workers.engine.plan import SamplingParams
from tandem.workers.engine.sequence import BeamSearch, PrefixRetention, SequenceSpec, Task, Turn
from tandem.workers.serve.submit import MAX_SUBMITTED_GRAMMAR_CHARACTERS, WorkerLimits, parse_submit

LIMITS = WorkerLimits(vocab_size=100, context_tokens=200, max_sequences=64, eos_ids=frozenset({0}))
KV = worker_pb2.KvHandle(num_tokens=3, endpoints=["127.0.0.1:1"])  # of the good prompt
PREFILL: dict[str, Any] = {"task": worker_pb2.TASK_PREFILL}
DECODE: dict[str, Any] = {"task": worker_pb2.TASK_DECODE, "kv": KV}
NAN, INF = float("nan"), float("inf")
RETAINED = {"num_tokens": 2, "seconds": 300}
PAST = 1.0000002  # a factor that a float32 feels


def submit(**fields: Any) -> worker_pb2.Submit:
    """A good submit, but for the fields given; those of `sampling` are added to what it has."""
    good: dict[str, Any] = {
        "task": worker_pb2.TASK_COLOCATED,
        "token_ids": [1, 2, 3],
        "max_tokens": 7,
        "num_choices": 1,
    }
    sampling = {"temperature": 0.5, "top_p": 0.75} | fields.pop("sampling", {})
    return worker_pb2.Submit(**good | fields, sampling=inference_pb2.SamplingParams(**sampling))


def parse(worker_limits: WorkerLimits = LIMITS, **fields: Any) -> SequenceSpec:
    return parse_submit(submit(**fields), 9, worker_limits)


def marked(**fields: Any) -> worker_pb2.Watermark:
    """The good watermark, but for the fields given."""
    changed = worker_pb2.Watermark()
    changed.CopyFrom(MESSAGE)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def words(count: int, length: int = 1) -> list[inference_pb2.TokenIds]:
    return [inference_pb2.TokenIds(ids=[1] * length) for _ in range(count)]


def test_a_submit_as_the_engine_takes_it() -> None:
    spec = parse(
        task=worker_pb2.TASK_PREFILL,
        first_index=2,
        sampling={"temperature": 0.5, "top_k": -1, "top_p": 0.75, "min_p": 0.25, "seed": 2**64 - 1},
        stop_token_ids=[5],
        cache_salt=b"salt",
        priority=-3,
    )
    assert spec == SequenceSpec(
        id=9,
        task=Task.PREFILL,
        tokens=(1, 2, 3),
        first_index=2,
        max_tokens=7,
        sampling=SamplingParams(temperature=0.5, top_k=0, top_p=0.75, min_p=0.25, seed=2**64 - 1),
        stop_ids=frozenset({0, 5}),
        priority=-3,
        salt=b"salt",
    )
    kept = parse(retentions=[RETAINED], tenant=b"ada")
    assert kept.retentions == (PrefixRetention(num_tokens=2, seconds=300),)
    assert kept.tenant == b"ada"
    handle = worker_pb2.KvHandle(num_tokens=3, endpoints=["127.0.0.1:1"])
    decode = parse(retentions=[RETAINED], task=worker_pb2.TASK_DECODE, kv=handle)
    assert decode.retentions == (), "the prefill worker retains it"
    assert parse(stop_token_ids=[5], ignore_eos=True).stop_ids == {5}
    assert parse(sampling={"top_k": 999}).sampling.top_k == LIMITS.vocab_size


@pytest.mark.parametrize(
    ("given", "turn", "is_recovery"),
    [
        (worker_pb2.TURN_UNSPECIFIED, Turn.BY_INDEX, True),
        (worker_pb2.TURN_FIRST_OF_PRIORITY, Turn.FIRST_OF_PRIORITY, False),
        (worker_pb2.TURN_IN_ORDER, Turn.IN_ORDER, False),
        (77, Turn.IN_ORDER, False),
    ],
)
def test_the_turn_of_what_was_begun_elsewhere(
    given: "worker_pb2.Turn", turn: Turn, is_recovery: bool
) -> None:
    spec = parse(first_index=2, turn=given)
    assert (spec.turn, spec.is_recovery) == (turn, is_recovery)


def test_all_that_shapes_a_distribution() -> None:
    spec = parse(
        num_choices=3,
        first_choice=2,
        logprobs=0,
        prompt_logprobs=20,
        processed_logprobs=True,
        grammar="start: /a/",
        bad_words=[inference_pb2.TokenIds(ids=[4, 5]), inference_pb2.TokenIds(ids=[6])],
        sampling={
            "seed": 2**64 - 1,
            "typical_p": 0.5,
            "repetition_penalty": 1.5,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.25,
            "logit_bias": {7: -1.5, 3: 100.0},
        },
    )
    assert spec.num_choices == 3
    assert spec.sampling == SamplingParams(
        temperature=0.5,
        top_p=0.75,
        seed=1,
        typical_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias=((3, 100.0), (7, -1.5)),
        bad_words=((4, 5), (6,)),
        grammar="start: /a/",
        logprobs=0,
        prompt_logprobs=20,
        processed_logprobs=True,
    )


def test_a_watermark_as_the_engine_takes_it() -> None:
    spec = parse(watermark=MESSAGE)
    expected = SamplingParams(temperature=0.5, top_p=0.75, watermark=WATERMARK)
    assert spec.sampling == expected
    assert spec.sampling.needs_history


def test_what_is_unset_does_nothing() -> None:
    spec = parse(num_choices=0)
    assert (spec.num_choices, spec.beam) == (1, None)
    assert spec.sampling == SamplingParams(temperature=0.5, top_p=0.75)
    assert not spec.sampling.needs_history


@pytest.mark.parametrize(
    ("first_index", "min_tokens", "min_length"),
    [(0, 0, 0), (0, 2, 5), (2, 1, 0), (2, 2, 0), (2, 3, 4)],
)
def test_min_tokens_are_of_the_whole_completion(
    first_index: int, min_tokens: int, min_length: int
) -> None:
    """Once there are so many, nothing is held back, and the sampler is not asked to."""
    spec = parse(first_index=first_index, min_tokens=min_tokens, stop_token_ids=[5, 4, 2000])
    assert spec.sampling.min_length == min_length
    assert spec.sampling.stop_ids == ((0, 4, 5) if min_length else ())  # such as the model has


def test_a_beam_search() -> None:
    spec = parse(
        num_choices=2,
        beam_search={"width": 4, "early_stopping": True},
        sampling={"min_p": NAN, "top_k": 3},
    )
    assert (spec.num_choices, spec.beam) == (
        4,
        BeamSearch(num_best=2, length_penalty=1.0, early_stopping=True),
    )
    assert spec.sampling == SamplingParams(temperature=0)
    spec = parse(beam_search={"width": 4, "length_penalty": 0.0}, min_tokens=2)
    assert spec.beam == BeamSearch(num_best=1, length_penalty=0.0)
    assert (spec.sampling.stop_ids, spec.sampling.min_length) == ((0,), 5)


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    worker_limits = WorkerLimits(
        vocab_size=5, context_tokens=200, max_sequences=64, eos_ids=frozenset({0})
    )
    sampling = parse(worker_limits, logprobs=20, prompt_logprobs=6).sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (5, 5)


def test_a_decode_computes_nothing_of_the_prompt() -> None:
    kv = worker_pb2.KvHandle(endpoints=["127.0.0.1:1"], num_tokens=3)
    sampling = parse(task=worker_pb2.TASK_DECODE, kv=kv, logprobs=2, prompt_logprobs=2).sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (2, None)


SAMPLING_BOUNDS: list[tuple[str, float, list[float]]] = [
    # The field, its bound, past it.
    ("temperature", 2, [2 * PAST, -0.1, NAN, INF]),
    ("top_k", 1_000_000, [1_000_000 + 1]),
    ("top_k", -1, [-2]),
    ("top_p", 1, [PAST, 0, NAN]),
    ("min_p", 1, [PAST, -0.1, NAN]),
    ("typical_p", 1, [PAST, 0, -1, NAN]),
    ("repetition_penalty", 10, [10 * PAST, NAN, INF]),
    ("repetition_penalty", 0.01, [0.00999, 0, -1]),
    ("presence_penalty", 2, [2 * PAST, NAN, INF]),
    ("presence_penalty", -2, [-2 * PAST, -INF]),
    ("frequency_penalty", 2, [2 * PAST, NAN, INF]),
    ("frequency_penalty", -2, [-2 * PAST, -INF]),
]
BOUNDS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # The field, at its bound, past it.
    ("token_ids", {"token_ids": [99]}, {"token_ids": [100]}),
    ("token_ids", {"token_ids": [99]}, {"token_ids": []}),
    ("max_tokens", {"max_tokens": 1}, {"max_tokens": 0}),
    ("first_index", {"first_index": 2}, {"first_index": 3}),
    ("min_tokens", {"min_tokens": 7}, {"min_tokens": 8}),
    ("min_tokens", {"min_tokens": 9, "first_index": 2}, {"min_tokens": 10, "first_index": 2}),
    ("stop_token_ids", {"stop_token_ids": range(64)}, {"stop_token_ids": range(65)}),
    ("cache_salt", {"cache_salt": bytes(64)}, {"cache_salt": bytes(65)}),
    ("priority", {"priority": 100}, {"priority": 101}),
    ("priority", {"priority": -100}, {"priority": -101}),
    ("num_choices", {"num_choices": 32}, {"num_choices": 33}),
    ("first_choice", {"first_choice": 31}, {"first_choice": 32}),
    (
        "first_choice",
        {"first_choice": 2, "num_choices": 30},
        {"first_choice": 3, "num_choices": 30},
    ),
    ("first_index", {"num_choices": 2}, {"num_choices": 2, "first_index": 1}),
    ("first_index", {"beam_search": {"width": 1}}, {"beam_search": {"width": 1}, "first_index": 1}),
    (
        "first_choice",
        {"beam_search": {"width": 1}},
        {"beam_search": {"width": 1}, "first_choice": 1},
    ),
    ("beam_search.width", {"beam_search": {"width": 16}}, {"beam_search": {"width": 17}}),
    ("beam_search.width", {"beam_search": {"width": 1}}, {"beam_search": {"width": 0}}),
    (
        "num_choices",
        {"beam_search": {"width": 3}, "num_choices": 3},
        {"beam_search": {"width": 3}, "num_choices": 4},
    ),
    (
        "beam_search",
        {"beam_search": {"width": 3}},
        {"beam_search": {"width": 3}, "grammar": "start: /a/"},
    ),
    ("beam_search", {"beam_search": {"width": 3}}, {"beam_search": {"width": 3}, "logprobs": 0}),
    (
        "beam_search",
        {"beam_search": {"width": 3}},
        {"beam_search": {"width": 3}, "prompt_logprobs": 0},
    ),
    *(
        (
            "length_penalty",
            {"beam_search": {"width": 2, "length_penalty": at}},
            {"beam_search": {"width": 2, "length_penalty": past}},
        )
        for at, past in [(10, 10 * PAST), (-10, -10 * PAST), (0, NAN), (0, INF)]
    ),
    ("logprobs", {"logprobs": 20}, {"logprobs": 21}),
    ("prompt_logprobs", {"prompt_logprobs": 20}, {"prompt_logprobs": 21}),
    (
        "grammar",
        {"grammar": "a" * MAX_SUBMITTED_GRAMMAR_CHARACTERS},
        {"grammar": "a" * (MAX_SUBMITTED_GRAMMAR_CHARACTERS + 1)},
    ),
    ("retentions", {"retentions": [RETAINED] * 5}, {"retentions": [RETAINED] * 6}),
    *(
        ("retentions[0]", {"retentions": [RETAINED | at]}, {"retentions": [RETAINED | past]})
        for at, past in [
            ({"num_tokens": 3}, {"num_tokens": 4}),
            ({"num_tokens": 1}, {"num_tokens": 0}),
            ({"seconds": 86_400}, {"seconds": 86_401}),
            ({"seconds": 1}, {"seconds": 0}),
        ]
    ),
    ("bad_words", {"bad_words": words(256)}, {"bad_words": words(257)}),
    ("bad_words", {"bad_words": words(1, 64)}, {"bad_words": words(1, 65)}),
    ("bad_words", {"bad_words": words(1, 1)}, {"bad_words": words(1, 0)}),
    ("bad_words", {"bad_words": [{"ids": [99]}]}, {"bad_words": [{"ids": [1]}, {"ids": [1, 100]}]}),
    ("bad_words", {"sampling": {}}, {"sampling": {"bad_words": ["text"]}}),
    *(
        (
            f"watermark.{name}",
            {"watermark": marked(**{name: at})},
            {"watermark": marked(**{name: past})},
        )
        for name, at, past in [
            ("key", bytes(16), bytes(15)),
            ("key", bytes(16), bytes(17)),
            ("gamma", 0.01, 0.0099),
            ("gamma", 0.99, 0.9901),
            ("gamma", 0.5, NAN),
            ("delta", 1e-6, 0),
            ("delta", 20, 20 * PAST),
            ("delta", 1, NAN),
            ("context_width", 1, 0),
            ("context_width", 8, 9),
        ]
    ),
    (
        "watermark",
        {"sampling": {"temperature": 1.1e-5}, "watermark": MESSAGE},
        {"sampling": {"temperature": 0}, "watermark": MESSAGE},
    ),
    (
        "watermark",
        {"beam_search": {"width": 2}},
        {"beam_search": {"width": 2}, "watermark": MESSAGE},
    ),
    ("watermark", {"sampling": {}}, {"sampling": {"watermark": True}}),
    (
        "watermark",
        {"logprobs": 1, "watermark": MESSAGE},
        {"logprobs": 1, "watermark": MESSAGE, "processed_logprobs": True},
    ),
    (
        "logit_bias",
        {"sampling": {"logit_bias": {99: 1.0}}},
        {"sampling": {"logit_bias": {100: 1.0}}},
    ),
    *(
        (name, {"sampling": {name: at}}, {"sampling": {name: past}})
        for name, at, pasts in SAMPLING_BOUNDS
        for past in pasts
    ),
    *(
        (
            "logit_bias",
            {"sampling": {"logit_bias": {1: at}}},
            {"sampling": {"logit_bias": {2: 0.0, 1: past}}},
        )
        for at, past in [(100, 100 * PAST), (-100, -100 * PAST), (0, NAN), (0, INF), (0, -INF)]
    ),
]


@pytest.mark.parametrize(("field", "at", "past"), BOUNDS)
def test_every_bound_is_the_last_good_value(
    field: str, at: dict[str, Any], past: dict[str, Any]
) -> None:
    parse(**at)
    with pytest.raises(InvalidArgument) as refused:
        parse(**past)
    named, _, bound = str(refused.value).partition(":")
    assert field in named
    assert bound
    assert "\n" not in bound


def test_so_many_biases_and_no_more() -> None:
    worker_limits = WorkerLimits(
        vocab_size=5000, context_tokens=200, max_sequences=64, eos_ids=frozenset()
    )
    assert (
        len(
            parse(
                worker_limits, sampling={"logit_bias": dict.fromkeys(range(1024), 1.0)}
            ).sampling.logit_bias
        )
        == 1024
    )
    with pytest.raises(InvalidArgument, match="logit_bias"):
        parse(worker_limits, sampling={"logit_bias": dict.fromkeys(range(1025), 1.0)})


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"num_choices": 5}, "num_choices"), ({"beam_search": {"width": 5}}, r"beam_search\.width")],
)
def test_as_many_sequences_as_the_worker_computes(fields: dict[str, Any], named: str) -> None:
    parse(
        WorkerLimits(vocab_size=100, context_tokens=200, max_sequences=5, eos_ids=frozenset()),
        **fields,
    )
    with pytest.raises(InvalidArgument, match=named):
        parse(
            WorkerLimits(vocab_size=100, context_tokens=200, max_sequences=4, eos_ids=frozenset()),
            **fields,
        )


def few(most: int, *, is_fallback: bool = False) -> WorkerLimits:
    """The limits of a worker that runs at most so many sequences at once."""
    return WorkerLimits(
        vocab_size=100,
        context_tokens=200,
        max_sequences=most,
        eos_ids=frozenset(),
        is_fallback=is_fallback,
    )


@pytest.mark.parametrize(
    ("fields", "is_fallback"), [(DECODE, False), ({}, True)], ids=["decode", "fallback"]
)
def test_more_sequences_than_a_worker_computes_may_run_at_another_one(
    fields: dict[str, Any], is_fallback: bool
) -> None:
    """A prefill worker that stands in for decode workers may run fewer than they do."""
    parse(few(5, is_fallback=is_fallback), num_choices=5, **fields)
    with pytest.raises(Unavailable, match="num_choices: must be at most 4 on this worker"):
        parse(few(4, is_fallback=is_fallback), num_choices=5, **fields)


@pytest.mark.parametrize("fields", [{}, {"first_index": 2}, DECODE], ids=["new", "begun", "decode"])
def test_a_sequence_that_is_too_long_here_may_fit_another_worker(fields: dict[str, Any]) -> None:
    assert parse(max_tokens=197, **fields).max_tokens == 197
    for past in (198, 2**32 - 1):
        with pytest.raises(Unavailable, match="max_tokens: must be at most 200 together with"):
            parse(max_tokens=past, **fields)


def test_a_prefill_needs_room_for_its_prompt_and_one_sequence() -> None:
    """The other tokens and choices begin at the decode worker."""
    spec = parse(few(4), token_ids=[1] * 199, max_tokens=5_000, num_choices=32, **PREFILL)
    assert (len(spec.tokens), spec.max_tokens, spec.num_choices) == (199, 5_000, 32)
    assert parse(few(4), beam_search={"width": 16}, **PREFILL).num_choices == 16
    with pytest.raises(Unavailable, match="token_ids: must be at most 199 on this worker"):
        parse(few(4), token_ids=[1] * 200, max_tokens=1, **PREFILL)


def test_a_model_with_more_end_tokens_than_an_opening_has_room_for() -> None:
    many = WorkerLimits(
        vocab_size=500, context_tokens=200, max_sequences=64, eos_ids=frozenset(range(140))
    )
    assert parse(many).stop_ids == many.eos_ids
    parse(many, beam_search={"width": 4})
    with pytest.raises(InvalidArgument, match="stop_token_ids"):
        parse(many, beam_search={"width": 5})
