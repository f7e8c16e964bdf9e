"""Text and chats to token ids and back, by the model folder's own tokenizer.json and chat template.

Imports neither torch nor code from the model's folder.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2

# Not `transformers.AutoTokenizer`: that import alone loads torch. Both end in the same tokenizer.json.
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from ..proto.errors import InvalidArgument
from ..proto.limits import MAX_PROMPT_CHARACTERS

_THREAD_FROM_CHARACTERS = 4_096
"""Byte-pair encoding takes about 1 ms for this many characters; longer texts leave the event loop."""

_MAX_TEMPLATE_MESSAGE = 200


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads; nothing in it changes after construction."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocab_size: int | None = None) -> None:
        """Takes ownership of `tokenizer`. `vocab_size`: rows of the model's embedding, if they are known."""
        self._template = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # The file may ask for truncation or padding of training batches; encode() alone obeys it, so switch it off.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special_ids: frozenset[int] = frozenset(tokenizer.all_special_ids)
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.vocab_size: int = vocab_size or max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Reads tokenizer.json, tokenizer_config.json, the chat template and config.json of a local model folder.

        Raises ValueError, in one line, if the folder has no tokenizer.json or it cannot be read."""
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(f"{folder / 'tokenizer.json'} is missing; Tandem needs a fast tokenizer")
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # the Rust parser raises bare Exception
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{folder / 'tokenizer.json'} cannot be read: {reason}") from error
        return cls(tokenizer, _vocab_size(folder / "config.json"))

    @property
    def has_chat_template(self) -> bool:
        return self._template.chat_template is not None

    async def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens that the tokenizer adds by itself."""
        if len(text) < _THREAD_FROM_CHARACTERS:
            return self._encode(text)
        return await asyncio.to_thread(self._encode, text)

    async def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of the rendered chat, with the opening of the assistant's answer.

        Raises InvalidArgument if the model has no chat template or the template refuses the messages."""
        if not self.has_chat_template:
            raise InvalidArgument("the model has no chat template; send text or token ids", "prompt.chat")
        if sum(len(message["content"]) for message in messages) < _THREAD_FROM_CHARACTERS:
            return self._encode_chat(messages)
        return await asyncio.to_thread(self._encode_chat, messages)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens; a cut character decodes to U+FFFD."""
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text

    def _encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        text = self._render(messages)
        if len(text) > MAX_PROMPT_CHARACTERS:
            raise InvalidArgument(f"the rendered chat has more than {MAX_PROMPT_CHARACTERS} characters", "prompt.chat")
        return self._encode(text, add_special_tokens=False)  # the template writes them itself

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        chat = [dict(message) for message in messages]
        try:
            return str(self._template.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # a template is a program: it can raise anything
            reason = ""
            if type(error) is jinja2.TemplateError:  # what templates raise on purpose, written for users
                reason = f": {str(error)[:_MAX_TEMPLATE_MESSAGE]}"
            raise InvalidArgument(f"the model's chat template refuses these messages{reason}", "prompt.chat") from error


def _vocab_size(config: Path) -> int | None:
    if not config.is_file():
        return None
    size = json.loads(config.read_text(encoding="utf-8")).get("vocab_size")
    return size if isinstance(size, int) else None
