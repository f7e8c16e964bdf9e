import asyncio
import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from tandem.proto import inference_pb2
from tandem.proto.errors import InvalidArgument
from tandem.router.frontend.tekken import SPLIT
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.tests.imported import imported
from tandem.tests.router.fake_source import byte_tokenizer
from tandem.tests.tiny_tokenizer import make_tokenizer
from tandem.tests.waits import WAIT

TEXTS = (
    "",
    " ",
    "The capital of France is",
    "  two  spaces\n\n\ttab",
    "今日は",
    "🦊🦊",
    "<|begin|>hi<|end|>",
    "x" * 5_000,
)
CHAT = [{"role": "user", "content": "Was ist 1+1?"}, {"role": "assistant", "content": "2 🦊"}]


def chat(messages: list[dict[str, str]]) -> inference_pb2.Chat:
    said = [
        inference_pb2.ChatMessage(role=message["role"], content=message["content"])
        for message in messages
    ]
    return inference_pb2.Chat(messages=said)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 640}))
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedTokenizerFast:
    found = AutoTokenizer.from_pretrained(folder)
    assert isinstance(found, PreTrainedTokenizerFast)
    return found


@pytest.mark.parametrize("text", TEXTS)
async def test_text_encodes_and_decodes_as_in_transformers(
    loaded: Tokenizer, reference: PreTrainedTokenizerFast, text: str
) -> None:
    ids = await loaded.encode(text)
    assert ids == reference(text)["input_ids"]
    assert loaded.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("length", [1, 5_000])
async def test_chat_encodes_as_in_transformers(
    loaded: Tokenizer, reference: PreTrainedTokenizerFast, length: int
) -> None:
    messages = [*CHAT, {"role": "user", "content": "ab " * length}]
    expected = reference.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert await loaded.encode_chat(chat(messages)) == expected


@pytest.mark.parametrize("text", TEXTS)
async def test_the_bytes_of_tokens_add_up_to_the_text(loaded: Tokenizer, text: str) -> None:
    ids = await loaded.encode(text)
    assert b"".join(loaded.token_bytes(token) for token in ids) == text.encode()
    assert loaded.decode(ids, skip_special=False) == text


def test_the_bytes_of_sentencepiece_tokens() -> None:
    vocab = {"<unk>": 0, "<s>": 1, "<0x0A>": 2, "<0xF0>": 3, "\u2581the": 4, "re": 5, "<0x1>": 6}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")  # type: ignore[no-untyped-call]
    tokenizer = Tokenizer(fast, vocab_size=16)
    expected = [
        b"<s>",
        b"\n",
        b"\xf0",
        b" the",
        b"re",
        b"<0x1>",
        b"",
    ]  # the last row of the embedding is of no token
    assert [tokenizer.token_bytes(token) for token in (1, 2, 3, 4, 5, 6, 15)] == expected
    assert tokenizer.decode([4, 5]) == " there"


async def test_special_tokens_that_are_not_wanted(loaded: Tokenizer, folder: Path) -> None:
    trained = PreTrainedTokenizerFast.from_pretrained(folder)
    trained.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<|begin|> $A", None, [("<|begin|>", 0)]
    )
    tokenizer = Tokenizer(trained)
    assert await tokenizer.encode("fox") == [
        0,
        *await tokenizer.encode("fox", add_special_tokens=False),
    ]
    assert tokenizer.decode(await tokenizer.encode("fox")) == "fox"


def test_ids_and_sizes(loaded: Tokenizer, reference: PreTrainedTokenizerFast) -> None:
    assert loaded.special_ids == set(reference.all_special_ids)
    assert (
        loaded.vocab_size == 640
    )  # of config.json: the embedding may have more rows than the tokenizer has tokens
    assert byte_tokenizer().vocab_size == 258


async def test_truncation_and_padding_of_the_file_are_ignored(folder: Path, tmp_path: Path) -> None:
    trained = PreTrainedTokenizerFast.from_pretrained(folder).backend_tokenizer
    trained.enable_truncation(4)
    trained.enable_padding(length=64)
    trained.save(str(tmp_path / "tokenizer.json"))
    assert len(await Tokenizer.load(tmp_path).encode("one two three four five six seven")) > 4
    assert len(await Tokenizer.load(tmp_path).encode("a")) < 64


def mistral_folder(
    folder: Path, config: dict[str, object], fourth: str = "[INST]", num_others: int = 0
) -> Path:
    """Writes a Mistral model's tokenizer as transformers 4 does: "12" is one token."""
    texts = ["<unk>", "<s>", "</s>", fourth, *sorted(pre_tokenizers.ByteLevel.alphabet()), "12"]
    texts += [f"other{index}" for index in range(num_others)]
    vocab = {text: token for token, text in enumerate(texts)}
    backend = Backend(models.BPE(vocab=vocab, merges=[("1", "2")]))
    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in texts[:4]])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "fourth", "pieces"),
    [
        ({"model_type": "mistral3"}, "[INST]", ["1", "2"]),
        ({"model_type": "mistral", "transformers_version": "4.52.4"}, "[INST]", ["1", "2"]),
        ({"model_type": "mistral", "transformers_version": "5.1.0"}, "[INST]", ["12"]),
        ({"model_type": "mistral"}, "<other>", ["12"]),  # another vocabulary
        ({"model_type": "llama"}, "[INST]", ["12"]),
        ({}, "[INST]", ["12"]),
    ],
)
def test_digits_are_tokens_of_their_own_in_tekken_vocabularies_of_older_files(
    tmp_path: Path, config: dict[str, object], fourth: str, pieces: list[str]
) -> None:
    tokenizer = Tokenizer.load(mistral_folder(tmp_path, config, fourth))
    ids = tokenizer._encode("12", True)
    assert [tokenizer.decode([token]) for token in ids] == pieces


def test_tekken_splits_texts_as_in_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which repairs large vocabularies if a flag says so, and warns otherwise."""
    folder = mistral_folder(tmp_path, {"model_type": "mistral3"}, num_others=100_000)
    expected = PreTrainedTokenizerFast.from_pretrained(folder, fix_mistral_regex=True)
    logger = logging.getLogger("transformers.tokenization_utils_tokenizers")
    logger.addHandler(caplog.handler)  # those of transformers do not reach the root logger
    try:
        found = Tokenizer.load(folder)
    finally:
        logger.removeHandler(caplog.handler)
    splitting = expected.backend_tokenizer.pre_tokenizer
    assert found._backend.pre_tokenizer.__getstate__() == splitting.__getstate__()
    assert "fix_mistral_regex" not in caplog.text


def test_tekken_splits_texts_as_in_gguf_files() -> None:
    assert GGUF_PRE_TOKENIZER_SPLITS["tekken"] == SPLIT


async def test_no_chat_template() -> None:
    with pytest.raises(InvalidArgument, match="no chat template") as caught:
        await byte_tokenizer(chat_template=None).encode_chat(chat(CHAT))
    assert caught.value.field == "prompt.chat"


async def test_many_very_long_texts_keep_no_other_text_and_no_chat_waiting(
    loaded: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats, end = byte_tokenizer(chat_template="{{ messages[0].content }}"), threading.Event()
    encode = Tokenizer._encode

    def encode_slowly(self: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) > 100_000:
            assert end.wait(WAIT)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "_encode", encode_slowly)
    long = chat([{"role": "user", "content": "x" * 110_000}])
    many = [
        asyncio.create_task(loaded.encode("x" * 110_000)) for _ in range(20)
    ]  # of the same caller
    many += [asyncio.create_task(chats.encode_chat(long)) for _ in range(20)]
    try:
        async with asyncio.timeout(WAIT / 2):
            assert await loaded.encode("x" * 10_000)
            assert await chats.encode_chat(chat(CHAT))
        assert not any(task.done() for task in many)
    finally:
        end.set()
        await asyncio.gather(*many)


async def test_many_ids_are_decoded_off_the_event_loop(
    loaded: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, ran = Tokenizer.decode, list[threading.Thread]()

    def noted(self: Tokenizer, ids: Sequence[int], **options: bool) -> str:
        ran.append(threading.current_thread())
        return decode(self, ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", noted)
    text = "one two three " * 5_000
    ids = await loaded.encode(text)
    assert await loaded.detokenize(ids) == text
    assert await loaded.detokenize(ids[:9]) == decode(loaded, ids[:9])
    assert [each is threading.main_thread() for each in ran] == [False, True]


async def test_another_caller_s_chat_waits_for_one_rendering_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer, rendered, may_end = byte_tokenizer(), list[str](), threading.Semaphore(0)
    has_begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def render(
        _self: Tokenizer, _chat: inference_pb2.Chat, variables: dict[str, Any], _now: float | None
    ) -> str:
        text: str = variables["conversations"][0][0]["content"]
        rendered.append(text)
        loop.call_soon_threadsafe(has_begun.set)
        assert may_end.acquire(timeout=WAIT)
        return text

    monkeypatch.setattr(Tokenizer, "_render", render)
    mine = [chat([{"role": "user", "content": f"m{number}"}]) for number in range(50)]
    many = [asyncio.create_task(tokenizer.encode_chat(each, "mallory")) for each in mine]
    async with asyncio.timeout(WAIT):
        await has_begun.wait()
    other = asyncio.create_task(
        tokenizer.encode_chat(chat([{"role": "user", "content": "a"}]), "ada")
    )
    await asyncio.sleep(0)  # it has its place
    may_end.release(51)
    assert bytes(await other) == b"a"
    await asyncio.gather(*many)
    assert rendered.index("a") == 1


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            "refuses these messages: roles must alternate",
        ),
        ("{{ messages[0].content.nothing.here }}", "refuses these messages$"),
        ("{{ 1 / 0 }}", "refuses these messages$"),
        ("{{ messages.append(1) }}", "refuses these messages$"),  # the sandbox is immutable
        ("{{ ''.__class__.__mro__ }}", "refuses these messages$"),
        ("{% for i in range(10**9) %}x{% endfor %}", "refuses these messages$"),
        ("{{ 'x' * 2000000 }}", "more than 1000000 characters"),
    ],
)
async def test_template_that_fails(template: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        await byte_tokenizer(chat_template=template).encode_chat(chat(CHAT))
    assert caught.value.field == "prompt.chat"


def test_folder_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1')
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read: .+") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_router_needs_no_torch(folder: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "import tandem.router.api.server.servers\n"
        "from tandem.router.frontend.tokenizer import Tokenizer\n"
        "Tokenizer.load(Path(sys.argv[1]))\n"
    )
    assert not {"ray", "torch"} & imported(code, str(folder))
