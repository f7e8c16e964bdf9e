"""Encodes texts and chats to token ids and decodes them.

Uses tokenizer.json and the chat template of the model folder. Imports neither torch nor code from
the model folder.
"""

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

# Not `transformers.AutoTokenizer`: that import loads torch. Both read the same tokenizer.json.
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from ...proto import inference_pb2
from ...proto.errors import InvalidArgument, Unavailable
from ...proto.home import tokenizer_file
from ...proto.limits import MAX_PROMPT_CHARACTERS, MAX_RETURNED_CHARACTERS
from ...proto.parameters import check_count
from .chat import active_tools, template_variables, with_developer_as_system
from .fair_threads import TOKENIZING, FairThreads
from .formats.calls import call_format, shows_call_format
from .formats.chat_format import AUTO, CALL_MARKUP
from .formats.reasoning import reasoning_format
from .spelled_tokens import LiteralEncoder, SpecialTokenEscaper, Spellings, encode_text
from .tekken import restore_splitting, special_tokens
from .template import NO_PROCESS, REFUSAL, RENDERER, TEMPLATE_OF_MODEL, render

_log = logging.getLogger(__name__)

_TEMPLATE_SECONDS = 5.0
_RENDERINGS: Final = FairThreads("tandem-templates", 1)  # the renderer takes one chat at a time

_TRUSTED_ROLES: Final = ("assistant", "system", "developer")
"""Roles whose messages may have markup of templates that is not a special token, such as <think>.

The model wrote these messages, or the operator of the service.
"""

_PROBE: Final = inference_pb2.Chat(
    messages=[inference_pb2.ChatMessage(role="user", content="Hello")]
)

_PROBE_TOOL: Final = "tandem_probe"
_TOOL_PROBE: Final = inference_pb2.Chat(
    messages=_PROBE.messages, tools=[inference_pb2.Tool(name=_PROBE_TOOL, description="Looks.")]
)

_INFILL_MARKS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder (arXiv 2305.06161), Granite Code
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
)
"""Tokens before a prefix, its suffix and the text between them (arXiv 2207.14255, prefix first)."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_WORD_START = "\u2581"  # SentencePiece writes it for a space

_BYTE_OF_CHARACTER: Final = {
    character: byte
    for byte, character in bytes_to_unicode().items()  # type: ignore[no-untyped-call]
}
"""The byte that each printable character of byte-level tokenizers stands for."""


class Tokenizer:
    """Encodes and decodes for one model. Immutable after construction, and thread-safe."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        vocab_size: int | None = None,
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Takes ownership of `tokenizer`.

        `vocab_size`: rows of the model's embedding, if known. The parsers are names of formats
        (formats). `chat_template_kwargs`: variables of the template that a chat does not
        set.
        """
        self.chat_template_kwargs: Mapping[str, Any] = chat_template_kwargs or {}
        self._template = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # The file may ask for truncation or padding, for training batches; encode() would obey.
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self._added = {token: text.content for token, text in added.items()}
        self._added_ids = {text: token for token, text in self._added.items()}
        special = {token for token, text in added.items() if text.special}
        special |= set(tokenizer.all_special_ids)
        self.special_markup: frozenset[str] = frozenset(
            self._added.get(token, "") for token in special
        )
        """Texts that are special tokens."""
        self.special_ids: frozenset[int] = frozenset(
            token for token in special if self._added.get(token) not in CALL_MARKUP
        )
        """Tokens that are not part of a decoded text."""
        self.vocab_size: int = (
            vocab_size or max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        )
        self.call_format: str = call_format(self.chat_template(tools=True), tool_call_parser)
        self._detects_calls = tool_call_parser == AUTO
        self.reasoning_format: str = reasoning_format(
            self.chat_template(tools=False), reasoning_parser
        )
        decoder = self._backend.decoder
        # The state is JSON and shows a decoder within a sequence as well.
        self._byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    @classmethod
    def load(
        cls,
        folder: Path,
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> "Tokenizer":
        """Reads the tokenizer of a local model folder: tokenizer.json, templates, configurations.

        `chat_template` replaces the templates of the folder; see `__init__` for its variables.
        tokenizer.json may be in the cache (`tokenizer_file`). Raises ValueError, in one line, if
        the folder has no tokenizer.json or it cannot be read.
        """
        file = tokenizer_file(folder)
        if not file.is_file():
            raise ValueError(f"{file} is missing; Tandem needs a fast tokenizer")
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                str(folder),
                local_files_only=True,
                tokenizer_file=str(file),
                **special_tokens(folder),
            )
        except Exception as error:  # the Rust parser raises bare Exception
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{file} cannot be read: {reason}") from error
        config = _config(folder / "config.json")
        restore_splitting(tokenizer.backend_tokenizer, config)
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        if tokenizer.chat_template is None:
            tokenizer.chat_template = _processor_template(folder / "chat_template.json")
        if tokenizer.chat_template is not None:
            RENDERER.start()
        size = config.get("vocab_size")
        return cls(
            tokenizer,
            size if isinstance(size, int) else None,
            tool_call_parser,
            reasoning_parser,
            chat_template_kwargs,
        )

    async def wait_for_chats(self) -> None:
        """Waits until chats can be rendered at once, if the model has a chat template.

        Raises Unavailable if the process of the templates does not start.
        """
        if self._template.chat_template is not None:
            await asyncio.to_thread(self._spelled[2].prepare)
            try:
                await asyncio.to_thread(RENDERER.wait)
            except (ChildProcessError, EOFError):
                raise Unavailable(NO_PROCESS) from None
            if not await asyncio.to_thread(self._writes_tools):
                _log.warning("the chat template does not write tools: the model never sees them")
            elif self._detects_calls and not shows_call_format(self.chat_template(tools=True)):
                _log.warning("the chat template shows no known format of calls: hermes is assumed")

    def check_chat_template(self) -> None:
        """Renders a chat of one message, if the model has a template.

        Raises ValueError, in one line, if that fails. A template that refuses the message with a
        reason passes.
        """
        try:
            self._render(_PROBE, self._variables(_PROBE))
        except InvalidArgument as error:
            reason = error.message.removeprefix("prompt.chat: ")
            is_refused = reason.startswith(TEMPLATE_OF_MODEL + REFUSAL)
            if self._template.chat_template is not None and not is_refused:
                raise ValueError(f"{reason}: it cannot render a chat of one message") from None

    def _writes_tools(self) -> bool:
        """Returns False if the template takes a chat with a tool and does not write the tool."""
        try:
            return _PROBE_TOOL in self._render(_TOOL_PROBE, self._variables(_TOOL_PROBE))
        except InvalidArgument:  # it may need variables
            return True

    def chat_template(self, tools: bool) -> str:
        """Returns the source of the chat template; "" without one.

        A model may have a separate template for chats with `tools`.
        """
        if self._template.chat_template is None:
            return ""
        try:
            return str(self._template.get_chat_template(None, [{}] if tools else None))
        except ValueError:  # several templates, and none for this case
            return ""

    def ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """Returns the ids of the added tokens among these texts."""
        return frozenset(self._added_ids[text] for text in texts if text in self._added_ids)

    def infill(self, prefix: str, suffix: str) -> str:
        """Returns the prompt whose completion lies between `prefix` and `suffix`.

        Raises InvalidArgument if the model has no tokens for it.
        """
        for before, hole, middle in _INFILL_MARKS:
            if self._added_ids.keys() >= {before, hole, middle}:
                return f"{before}{prefix}{hole}{suffix}{middle}"
        raise InvalidArgument(
            "the model has no tokens for filling in; send the prefix alone, or ask in a chat",
            "prompt.suffix",
        )

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, fairness_id: str = ""
    ) -> list[int]:
        """Returns the token ids of `text`, by default with the tokenizer's own special tokens.

        Long texts wait for a thread, which callers share fairly (FairThreads.run). Raises
        InvalidArgument if the text has too many tokens, and Overloaded if too many texts wait.
        """
        return await TOKENIZING.run(fairness_id, len(text), self._encode, text, add_special_tokens)

    async def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, fairness_id: str = ""
    ) -> list[list[int]]:
        """Returns the token ids of each text, as `encode` does, in one task for all texts."""

        def encode() -> list[list[int]]:
            return [self._encode(text, add_special_tokens) for text in texts]

        return await TOKENIZING.run(fairness_id, sum(map(len, texts)), encode)

    async def encode_chat(
        self, chat: inference_pb2.Chat, fairness_id: str = "", now: float | None = None
    ) -> list[int]:
        """Returns the token ids of a checked chat as the model's template renders it.

        The ids end with the opening of the assistant's answer, or with the last message if that is
        to be continued. `now`: the time that the template sees, in seconds of time.time(); None:
        the present. The chat waits for a thread, see FairThreads. Raises InvalidArgument if the
        model has no chat template, or if the template refuses the messages, renders too many
        characters or takes more than 5 seconds, and Overloaded if too many chats wait.
        """
        # Always in a thread, because the renderer waits for another process.
        num_characters, encode = await _RENDERINGS.run(
            fairness_id, chat.ByteSize(), self._render_chat, chat, now
        )
        return await TOKENIZING.run(fairness_id, num_characters, encode)

    async def detokenize(
        self, ids: Sequence[int], fairness_id: str = "", field: str = "token_ids"
    ) -> str:
        """Returns the text of `ids` with the names of special tokens.

        Long lists wait for a thread, see FairThreads. Raises InvalidArgument, which names `field`,
        if the text has too many characters.
        """

        def decode() -> str:
            text = self.decode(ids, skip_special=False)
            check_count(len(text), MAX_RETURNED_CHARACTERS, "characters", field)
            return text

        return await TOKENIZING.run(fairness_id, len(ids), decode)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Returns the text of `ids`, by default without special tokens.

        A cut character decodes to U+FFFD.
        """
        shown = list(ids)
        if skip_special:
            shown = [token for token in shown if token not in self.special_ids]
        if len(shown) < TOKENIZING.thread_from:
            text: str = self._backend.decode(shown, skip_special_tokens=False)
        else:  # releases the interpreter's lock, which `decode` holds
            (text,) = self._backend.decode_batch([shown], skip_special_tokens=False)
        return text

    async def text_of_prompt(self, ids: Sequence[int], fairness_id: str = "") -> str:
        """Returns the text of `ids` without the special tokens that the tokenizer puts first.

        Raises InvalidArgument if the text is too long for `echo`.
        """
        added = self._added_before
        if list(ids[: len(added)]) == added:
            ids = ids[len(added) :]
        return await self.detokenize(ids, fairness_id, "echo")

    @cached_property
    def _added_before(self) -> list[int]:
        """The special tokens that the tokenizer puts before a text."""
        ids = self._encode("a", add_special_tokens=True)
        first = next((i for i, token in enumerate(ids) if token not in self.special_ids), 0)
        return ids[:first]

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of a token: a special token's name, b"" for an unused id."""
        if token in self._added:
            return self._added[token].encode()
        piece: str | None = self._backend.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            return b"".join(
                bytes((_BYTE_OF_CHARACTER[c],)) if c in _BYTE_OF_CHARACTER else c.encode()
                for c in piece
            )
        if byte := _BYTE_PIECE.fullmatch(piece):
            return bytes((int(byte[1], 16),))
        return piece.replace(_WORD_START, " ").encode()

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return encode_text(self._backend, text, add_special_tokens=add_special_tokens)

    def _variables(self, chat: inference_pb2.Chat) -> dict[str, Any]:
        """Returns the variables of the template; the chat's own win over the operator's."""
        return {**self.chat_template_kwargs, **template_variables(chat)}

    def _render_chat(
        self, chat: inference_pb2.Chat, now: float | None
    ) -> tuple[int, Callable[[], list[int]]]:
        """Renders a chat; returns the number of characters and a function that encodes them."""
        template = self.chat_template(tools=bool(active_tools(chat)))
        variables = with_developer_as_system(self._variables(chat), template)
        if chat.parse_special:
            rendered = self._render(chat, variables, now)
            return len(rendered), partial(self._encode, rendered, False)
        escaper = SpecialTokenEscaper(json.dumps(variables, ensure_ascii=False))
        special, control, encoder = self._spelled
        (messages,) = variables.pop("conversations")
        hidden = [
            escaper.escape(each, special if each["role"] in _TRUSTED_ROLES else control)
            for each in messages
        ]
        variables = {name: escaper.escape(value, special) for name, value in variables.items()}
        rendered = self._render(chat, variables | {"conversations": [hidden]}, now)
        if escaper.is_active or self._normalizes_special:
            return len(rendered), partial(encoder.encode, rendered, escaper)
        return len(rendered), partial(self._encode, rendered, False)

    @cached_property
    def _spelled(self) -> tuple[Spellings, Spellings, LiteralEncoder]:
        """Finders of special tokens and of all tokens that templates write, and their encoder."""
        special = {token: text for token, text in self._added.items() if token in self.special_ids}
        templates = self.chat_template(tools=False) + self.chat_template(tools=True)
        written = {
            token: text
            for token, text in self._added.items()
            if text.strip() and (text in templates or text in CALL_MARKUP)
        }
        control = special | written
        return (
            Spellings(special.values()),
            Spellings(control.values()),
            LiteralEncoder(self._backend, control),
        )

    @cached_property
    def _normalizes_special(self) -> bool:
        """True if a text other than its name may become a special token."""
        added = self._backend.get_added_tokens_decoder()
        return self._backend.normalizer is not None and any(
            text.special and text.normalized for text in added.values()
        )

    def _render(
        self, chat: inference_pb2.Chat, variables: dict[str, Any], now: float | None = None
    ) -> str:
        source = self.chat_template(tools=bool(active_tools(chat)))
        if not source:
            raise InvalidArgument(
                "the model has no chat template; send text or token ids, or serve the model with "
                "--chat-template",
                "prompt.chat",
            )
        variables = {**self._template.special_tokens_map, **variables, "chat_template": source}
        return render(
            RENDERER,
            variables,
            max_characters=MAX_PROMPT_CHARACTERS,
            seconds=_TEMPLATE_SECONDS,
            now=time.time() if now is None else now,
        )


def _processor_template(path: Path) -> str | None:
    """Reads the separate file in which older processors keep the chat template."""
    if not path.is_file():
        return None
    try:
        template = json.loads(path.read_text(encoding="utf-8"))["chat_template"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{path.name}: chat_template: is missing") from None
    if not isinstance(template, str):
        raise ValueError(f"{path.name}: chat_template: must be a string")
    return template


def _config(path: Path) -> dict[str, Any]:
    """Returns the fields of config.json; empty without the file."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
