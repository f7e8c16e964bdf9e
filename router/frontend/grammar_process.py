"""Checks constraints, in a process of its own that constraint.py starts."""

import json
from functools import partial

from ...proto import inference_pb2
from ...proto.deep_stack import on_deep_stack
from .child_process import answer_requests
from .constraint import check_constraint


def _check(request: bytes) -> bytes:
    constraint = inference_pb2.Constraint.FromString(request)
    return json.dumps(on_deep_stack(partial(check_constraint, constraint))).encode()


if __name__ == "__main__":
    answer_requests(_check)
