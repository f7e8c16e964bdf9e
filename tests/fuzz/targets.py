"""What reads bytes from outside, each as a function of bytes that may fail in its documented way
alone, with seeds.
"""

import struct
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from tandem.cluster.config import load_config
from tandem.cluster.store.pooling import pooling_rules
from tandem.proto import inference_pb2
from tandem.proto.errors import InvalidArgument
from tandem.proto.parameters import check_request
from tandem.router.api.anthropic.requests import parse_count_tokens, parse_messages
from tandem.router.api.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tandem.router.api.openai.parsing import parse
from tandem.router.api.openai.requests import parse_chat, parse_completion
from tandem.router.api.responses.bodies import ResponsesBody
from tandem.router.api.responses.requests import translate_responses
from tandem.router.auth.keys import load_keys
from tandem.router.frontend.chat import check_chat, json_object
from tandem.router.frontend.validation import check_parameters
from tandem.router.resume.event_ids import EventIdSigner, check_event_id
from tandem.router.resume.policy import ResumePolicy
from tandem.router.resume.tokens import ProgressSigner, ResumeBinding, ResumeKey, check_resume
from tandem.workers.kv_cache.layout import KvSpan
from tandem.workers.model.checkpoint import read_tensors
from tandem.workers.model.config import CheckpointError, parse_json, read_fields
from tandem.workers.model.models.parsing import parse_decoder_config
from tandem.workers.transfer import frames

_KEY: Final = ResumeKey(b"k" * 32)
_DIGEST: Final = b"d" * 8
_POLICY: Final = ResumePolicy(wall_clock=lambda: 0.0)  # seeds are made long before they are read
_BINDING: Final = ResumeBinding(
    key=_KEY,
    policy=_POLICY,
    digest=_DIGEST,
    seed=7,
    answer=b"a" * 8,
    began=0,
    context_tokens=512,
)
_RESUMED: Final = ProgressSigner(_BINDING, 0, ()).sign([1, 2], False, 0)


@dataclass(frozen=True, kw_only=True)
class Target:
    """Names a parser, what it may raise, and inputs that it takes."""

    read: Callable[[bytes], object]
    raises: tuple[type[Exception], ...]
    seeds: Sequence[bytes]

    def __call__(self, data: bytes) -> None:
        """Raises what the parser may not raise."""
        with suppress(*self.raises):
            self.read(data)


def frame(data: bytes) -> object:
    """Reads a KV frame with the right checksum: a wrong one is all that most changes would show."""
    body = data[4:]
    with suppress(frames.TransferError):
        frames.decode(data)
    return frames.decode(struct.pack(">I", frames.checksum_of(body)) + body)


def resume_token(data: bytes) -> object:
    """Reads a token as it came, and one with the right signature."""
    given = [inference_pb2.ResumedChoice(resume_token=data, token_ids=[1, 2])]
    with suppress(InvalidArgument):
        check_resume(given, _BINDING, 1)
    signed = data[:-16] + _KEY.sign(data[:-16])
    given = [inference_pb2.ResumedChoice(resume_token=signed, token_ids=[1, 2])]
    return check_resume(given, _BINDING, 1)


def event_id(data: bytes) -> object:
    return check_event_id(data.decode("latin-1"), _BINDING, 1)


def _event_id() -> bytes:
    signer = EventIdSigner(_BINDING, None)
    signer.take(0, [1, 2_000], False)
    return signer.sign(0)


def generate_request(data: bytes) -> object:
    request = inference_pb2.GenerateRequest.FromString(data)
    check_request(request)
    check_parameters(request, 258)
    check_chat(request.prompt.chat)
    return request


def in_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Makes the target of what reads a file, or a file in a folder."""

    def read_bytes(data: bytes) -> object:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, name)
            path.write_bytes(data)
            return read(path)

    return read_bytes


def config_json(path: Path) -> object:
    return parse_decoder_config(read_fields(path.parent))


def bodies(data: bytes) -> object:
    for kind in (TokenizeBody, DetokenizeBody, CompletionBody):
        with suppress(InvalidArgument):
            parse(kind, data)
    with suppress(InvalidArgument):
        list(parse_completion(data, "id").requests())
    for translate in (parse_chat, parse_messages):
        with suppress(InvalidArgument):
            list(translate(data, "id").requests())
    with suppress(InvalidArgument):
        list(translate_responses(parse(ResponsesBody, data), "id").requests())
    with suppress(InvalidArgument):
        parse_count_tokens(data)
    return parse(ChatBody, data)


_FRAME_KEY: Final = frames.TransferKey(transfer_id=b"t" * 16, epoch=3)
_SPAN: Final = KvSpan(
    first_layer=0, num_layers=2, first_token=0, num_tokens=4, first_slot=0, num_slots=1
)
_HEADER: Final = b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
_CONFIG: Final = (
    b'{"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 8, '
    b'"intermediate_size": 8, '
    b'"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, '
    b'"max_position_embeddings": 64, '
    b'"rms_norm_eps": 1e-5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "torch_dtype": '
    b'"float32"}'
)
_CHAT: Final = (
    b'{"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "n": 2, '
    b'"tools": [{"type": "function", "function": {"name": "f"}}]}'
)

_MESSAGES: Final = (
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, '
    b'{"type": "tool_result", '
    b'"tool_use_id": "a", "content": "x"}]}, {"role": "assistant", "content": [{"type": '
    b'"tool_use", "id": "a", '
    b'"name": "f", "input": {"b": 1}}]}], "max_tokens": 3, "system": "s", "tools": [{"name": "f", '
    b'"input_schema": {}}]}'
)
_RESPONSES: Final = (
    b'{"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}, '
    b'{"type": "function_call", '
    b'"call_id": "a", "name": "f", "arguments": "{}"}, '
    b'{"type": "function_call_output", "call_id": "a", "output": "x"}], '
    b'"tools": [{"type": "function", "name": "f"}], "text": '
    b'{"format": {"type": "json_schema", "schema": {}}}}'
)

TARGETS: Final = {
    "frame": Target(
        read=frame,
        raises=(frames.TransferError,),
        seeds=[
            frames.encode(_FRAME_KEY, frames.Open(layout=b"x", transports={"shared": {"a": 1}})),
            frames.encode(
                _FRAME_KEY, frames.Pull(first_token=0, group=1, first_slot=2, num_slots=3)
            ),
            frames.encode(
                _FRAME_KEY,
                frames.Commit(
                    num_frames=1,
                    num_tokens=2,
                    prefix_hash=b"h",
                    tokens=[1, 2],
                    logprobs=[-0.5, -1.0],
                ),
                b"payload",
            ),
        ],
    ),
    "resume token": Target(read=resume_token, raises=(InvalidArgument,), seeds=[_RESUMED]),
    "event id": Target(read=event_id, raises=(InvalidArgument,), seeds=[b"CgA=", _event_id()]),
    "gRPC request": Target(
        read=generate_request,
        raises=(InvalidArgument, DecodeError),
        seeds=[
            inference_pb2.GenerateRequest(
                prompt={
                    "chat": {
                        "messages": [{"role": "user", "content": "hi"}],
                        "template_kwargs": '{"a": 1}',
                    }
                },
                sampling={"temperature": 0.5, "logit_bias": {1: 2.0}, "bad_words": ["x"]},
                stopping={"stop": ["y"], "max_tokens": 3},
            ).SerializeToString()
        ],
    ),
    "HTTP body": Target(
        read=bodies,
        raises=(InvalidArgument,),
        seeds=[_CHAT, b'{"prompt": [[1, 2], "x"], "logprobs": 1}', _MESSAGES, _RESPONSES],
    ),
    "JSON of a tool": Target(
        read=lambda data: json_object(data.decode("latin-1")),
        raises=(),
        seeds=[b'{"a": [1.5, null]}'],
    ),
    "configuration": Target(
        read=in_file("service.yaml", load_config),
        raises=(InvalidArgument,),
        seeds=[
            b"model: m\nrouter: {grpc_port: 0, cors_origins: ['*']}\nprefill:\n  replicas: 2\n",
            b"model: &a [*a]\n",
        ],
    ),
    "API keys": Target(
        read=in_file("keys.json", load_keys),
        raises=(InvalidArgument,),
        seeds=[b'{"keys": []}', b"keys: []\n"],
    ),
    "config.json": Target(
        read=in_file("config.json", config_json), raises=(CheckpointError,), seeds=[_CONFIG]
    ),
    "modules.json": Target(
        read=in_file("modules.json", lambda path: pooling_rules(path.parent)),
        raises=(),
        seeds=[b'[{"type": "m.Transformer"}, {"type": "m.Pooling", "path": "1_Pooling"}]'],
    ),
    "JSON of a model": Target(
        read=lambda data: parse_json("x", data),
        raises=(CheckpointError,),
        seeds=[_CONFIG, b"[1e999]"],
    ),
    "safetensors": Target(
        read=in_file("model.safetensors", lambda path: read_tensors(path.parent)),
        raises=(CheckpointError,),
        seeds=[struct.pack("<Q", len(_HEADER)) + _HEADER + bytes(8)],
    ),
    "safetensors index": Target(
        read=in_file("model.safetensors.index.json", lambda path: read_tensors(path.parent)),
        raises=(CheckpointError,),
        seeds=[b'{"weight_map": {"x": "a.safetensors"}}'],
    ),
}
