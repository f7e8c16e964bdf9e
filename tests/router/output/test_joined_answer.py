"""Tests the messages of answers that are not streamed."""

from tandem.proto import inference_pb2
from tandem.router.output.joined_answer import JoinedAnswer

STOP = inference_pb2.FINISH_REASON_STOP


def test_the_usage_is_in_the_message_of_the_last_choice_only() -> None:
    """It comes with the choice that ends last, which may have any number."""
    answer = JoinedAnswer()
    usage = inference_pb2.Usage(completion_tokens=3)
    for message in (
        inference_pb2.GenerateResponse(choice=0, text="a", token_ids=[1], reasoning="x"),
        inference_pb2.GenerateResponse(choice=1, text="c", token_ids=[3], finish_reason=STOP),
        inference_pb2.GenerateResponse(
            choice=0, text="b", token_ids=[2], first_index=1, finish_reason=STOP, usage=usage
        ),
    ):
        answer.add(message)
    assert answer.messages() == [
        inference_pb2.GenerateResponse(
            choice=0, text="ab", token_ids=[1, 2], reasoning="x", finish_reason=STOP
        ),
        inference_pb2.GenerateResponse(
            choice=1, text="c", token_ids=[3], finish_reason=STOP, usage=usage
        ),
    ]
