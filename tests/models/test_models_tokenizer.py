"""Tokenizers built from GGUF metadata agree with the models' own ones on any text, and stream whole characters."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from model_files import write_gguf
from tokenizers import decoders, models, pre_tokenizers, trainers

from pshard.errors import UserError
from pshard.models import open_model
from pshard.models.text.gguf_tokenizer import PRE_TOKENIZERS, gguf_tokenizer
from pshard.models.text.hf_tokenizer import hf_chat_template, hf_tokenizer
from pshard.models.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog; the dog's owner didn't mind. It'll DO, they'RE fine!",
    "In 1984 there were 12345 people, 3.14159 of them odd... (see section 42)\r\n\r\n\tindented   code {x += 1;}",
    "Grüße aus Köln, ça va? Ωmega ελληνικά, русский текст, 中文字符和日本語のテキスト, 한국어, हिन्दी, 😀🎉👩‍👩‍👧",
    "def f(x):\n    return x**2 + 7  # comment\n\n\nclass A: pass",
] * 4
SPECIALS = ["<|start|>", "<|im_end|>"]
TEXTS = st.text(
    alphabet=st.one_of(
        st.sampled_from(" \n\r\t'sStTreREabcXYZ0123456789.,!?-_/\\<|>éeü中文😀é"), st.characters(codec="utf-8")
    ),
    max_size=60,
)


def train_byte_level() -> tuple[dict[str, int], list[tuple[str, str]]]:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, min_frequency=2, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    data = json.loads(backend.to_str())["model"]
    return data["vocab"], [tuple(m) for m in data["merges"]]


VOCAB, MERGES = train_byte_level()


def bpe_metadata(pre: str, **more: Any) -> dict[str, Any]:
    tokens = [*sorted(VOCAB, key=VOCAB.__getitem__), *SPECIALS, "<think>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(VOCAB) + [3, 3, 4],
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in MERGES],
        "tokenizer.ggml.bos_token_id": len(VOCAB),
        "tokenizer.ggml.eos_token_id": len(VOCAB) + 1,
        **{f"tokenizer.ggml.{k}": v for k, v in more.items()},
    }


def byte_level_reference(pattern: str | None, whole_words: bool) -> tokenizers.Tokenizer:
    """Byte-level BPE that cuts text by a pattern from elsewhere; None is the library's own GPT-2 pattern."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=VOCAB, merges=MERGES, ignore_merges=whole_words))
    cut = [] if pattern is None else [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cut, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


@settings(max_examples=150)
@given(TEXTS)
def test_gpt2_encoding_equals_the_library_pattern(text: str) -> None:
    assert GPT2.encode(text, add_special=False) == GPT2_REFERENCE.encode(text).ids


GPT2_REFERENCE = byte_level_reference(None, whole_words=False)
GPT2 = gguf_tokenizer(bpe_metadata("gpt-2"), "x.gguf")
LLAMA3 = gguf_tokenizer(bpe_metadata("llama-bpe"), "x.gguf")
QWEN2 = gguf_tokenizer(bpe_metadata("qwen2"), "x.gguf")


@pytest.fixture(scope="module")
def qwen2_reference() -> Any:
    from transformers import Qwen2Tokenizer

    return Qwen2Tokenizer(vocab=dict(VOCAB), merges=list(MERGES))


def test_patterns_are_those_of_the_reference_library() -> None:
    reference = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping").GGUF_PRE_TOKENIZER_SPLITS
    shared = set(reference) & set(PRE_TOKENIZERS)
    assert {"llama-bpe", "qwen2", "tekken", "gpt-4o"} <= shared
    assert {name: PRE_TOKENIZERS[name].patterns for name in shared} == {name: (reference[name],) for name in shared}


def test_llama3_takes_words_of_the_vocabulary_whole_and_digits_in_threes() -> None:
    metadata = bpe_metadata("llama-bpe")
    metadata["tokenizer.ggml.tokens"][300] = "xyzzy"  # no merge leads here
    metadata["tokenizer.ggml.merges"] = []
    assert gguf_tokenizer(metadata, "x.gguf").encode("xyzzy", add_special=False) == [300]
    metadata["tokenizer.ggml.tokens"][301] = "123"
    three = gguf_tokenizer(metadata, "x.gguf").encode("1234", add_special=False)
    assert three == [301, VOCAB["4"]]


@settings(max_examples=50)
@given(text=TEXTS)
def test_glm_cuts_text_like_llama3_and_adds_no_begin_token(text: str) -> None:
    for pre in ("glm4", "chatglm-bpe"):
        ours = gguf_tokenizer(bpe_metadata(pre), "x.gguf")
        assert ours.encode(text) == LLAMA3.encode(text, add_special=False)


def test_a_harmony_turn_does_not_end_with_a_message_in_it() -> None:
    metadata = bpe_metadata("gpt-4o", eos_token_id=500)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    for token in ("<|end|>", "<|call|>", "<|return|>"):
        tokens.append(token)
        types.append(3)
    named = [tokens.index(t) for t in ("<|call|>", "<|return|>", "<|im_end|>")]
    assert set(gguf_tokenizer(metadata, "x.gguf").eos_ids) == {500, *named}
    tokens[tokens.index("<|return|>")] = "<|other|>"
    assert tokens.index("<|end|>") in gguf_tokenizer(metadata, "x.gguf").eos_ids


@pytest.mark.parametrize(
    ("pre", "cuts"),
    [
        ("smollm", [" a", "1", "2", "!"]),
        ("command-r", [" a", "1", "2", "!"]),
        ("refact", [" a", "1", "2", "!"]),  # granite
        ("dbrx", [" a", "12", "!"]),  # Phi-4
        ("seed-coder", [" a", "1", "2", "!"]),
        ("bailingmoe", [" a", "1", "2", "!"]),
        ("exaone", [" a", "1", "2", "!"]),
        ("exaone-moe", [" a", "1", "2", "!"]),
        ("deepseek-coder", [" a", "1", "2", "!"]),
        ("minimax-m2", [" a", "12", "!"]),
        ("tiny_aya", [" a", "12", "!"]),
        ("jais-2", [" a", "12", "!"]),
        ("hunyuan-dense", [" a", "12", "!"]),
        ("default", [" a", "12", "!"]),
    ],
)
def test_text_is_cut_before_bpe_as_the_kind_says(pre: str, cuts: list[str]) -> None:
    backend = gguf_tokenizer(bpe_metadata(pre), "x.gguf")._backend
    assert [piece.replace("Ġ", " ") for piece, _ in backend.pre_tokenizer.pre_tokenize_str(" a12!")] == cuts


def test_seed_coder_cuts_marks_before_line_ends() -> None:
    backend, text = gguf_tokenizer(bpe_metadata("seed-coder"), "x.gguf")._backend, "It's x;\r\n}"
    cuts = [text[begin:end] for _, (begin, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert cuts == ["It", "'s", " x", ";", "\r\n", "}"]


def test_a_turn_of_gemma_ends() -> None:
    metadata = bpe_metadata("qwen2")
    metadata["tokenizer.ggml.tokens"][len(VOCAB)] = "<end_of_turn>"
    assert len(VOCAB) in gguf_tokenizer(metadata, "x.gguf").eos_ids


@pytest.mark.parametrize(
    ("pre", "cuts"),
    [
        ("deepseek-llm", ["It", "'", "s", " ", "1234", " w", "\u00f6", "rd", "中文カ", "ab", ".", "\n", "  "]),
        ("deepseek-v3", ["It", "'s", " ", "123", "4", " w\u00f6rd", "中文カ", "ab", ".\n", "  "]),
        ("kimi-k2", ["It's", " ", "123", "4", " w\u00f6rd", "中文", "カab", ".\n", "  "]),
    ],
)
def test_deepseek_and_kimi_cut_text_at_han_and_digits(pre: str, cuts: list[str]) -> None:
    """deepseek-llm's third pattern holds the letters of ASCII, so that others stand alone."""
    backend, text = gguf_tokenizer(bpe_metadata(pre), "x.gguf")._backend, "It's 1234 w\u00f6rd中文カab.\n  "
    assert [text[begin:end] for _, (begin, end) in backend.pre_tokenizer.pre_tokenize_str(text)] == cuts


def test_qwen35_leaves_marks_in_the_words_that_they_stand_in() -> None:
    for pre, cuts in (("qwen35", ["नमस्ते", "1", "2"]), ("qwen2", ["नमस", "्त", "े", "1", "2"])):
        backend, text = gguf_tokenizer(bpe_metadata(pre), "x.gguf")._backend, "नमस्ते12"
        assert [text[begin:end] for _, (begin, end) in backend.pre_tokenizer.pre_tokenize_str(text)] == cuts


@settings(max_examples=200)
@given(text=TEXTS)
def test_qwen2_encoding_and_decoding_equal_transformers(qwen2_reference: Any, text: str) -> None:
    assume("<|endoftext|>" not in text)  # a token of the reference alone, which hypothesis finds in sources
    ids = QWEN2.encode(text, add_special=False)
    assert ids == qwen2_reference.encode(text)
    assert QWEN2.decode(ids) == qwen2_reference.decode(ids)


@settings(max_examples=150)
@given(TEXTS)
def test_byte_level_round_trips_any_text(text: str) -> None:
    assert LLAMA3.decode(LLAMA3.encode(text)) == text


@settings(max_examples=150)
@given(st.lists(st.integers(0, LLAMA3.vocab_size + 5), max_size=30))
def test_streaming_any_ids_gives_the_same_text_as_decoding(ids: list[int]) -> None:
    stream = LLAMA3.stream()
    assert "".join(stream.push(i) for i in ids) + stream.finish() == LLAMA3.decode(ids)


def test_a_character_cut_over_tokens_is_streamed_whole() -> None:
    ids = LLAMA3.encode("a🎈b", add_special=False)
    stream = LLAMA3.stream()
    pieces = [stream.push(i) for i in ids]
    assert [p for p in pieces if p] == ["a", "🎈", "b"] and len(ids) > 4
    assert stream.finish() == ""


def test_an_unfinished_character_shows_at_the_end_as_replacement() -> None:
    stream = LLAMA3.stream()
    assert [stream.push(i) for i in LLAMA3.encode("🎈", add_special=False)[:2]] == ["", ""]
    assert stream.finish() == "\ufffd"


def test_special_tokens_in_text_become_ids_and_are_left_out_of_decoded_text() -> None:
    start, end, think = (len(VOCAB) + i for i in range(3))
    ids = QWEN2.encode("<|start|>hi<think>x<|im_end|>", add_special=False)
    assert ids[0] == start and ids[-1] == end and think in ids
    assert QWEN2.decode(ids) == "hi<think>x"


def test_begin_token_follows_the_file_and_else_the_kind_of_tokenizer() -> None:
    start = len(VOCAB)
    assert LLAMA3.encode("hi")[0] == start
    assert start not in QWEN2.encode("hi")
    told = gguf_tokenizer(bpe_metadata("qwen2", add_bos_token=True, add_eos_token=True), "x.gguf")
    assert told.encode("hi")[0] == start and told.encode("hi")[-1] == start + 1
    assert told.encode("hi", add_special=False) == QWEN2.encode("hi")
    silent = gguf_tokenizer(bpe_metadata("llama-bpe", add_bos_token=False), "x.gguf")
    assert start not in silent.encode("hi")
    assert (told.bos_id, told.bos_text, told.eos_text) == (start, *SPECIALS)


def test_smaug_cuts_as_llama3_and_neither_begins_a_text_nor_takes_words_whole() -> None:
    metadata = bpe_metadata("smaug-bpe")
    smaug = gguf_tokenizer(metadata, "x.gguf")
    text = "12345 it's GRÜẞE\n"
    assert smaug.encode(text) == smaug.encode(text, add_special=False) == LLAMA3.encode(text, add_special=False)
    metadata["tokenizer.ggml.tokens"][300] = "xyzzy"  # no merge leads here
    metadata["tokenizer.ggml.merges"] = []
    assert gguf_tokenizer(metadata, "x.gguf").encode("xyzzy") == [VOCAB[letter] for letter in "xyzzy"]


def test_turn_ends_join_the_end_token_of_the_file() -> None:
    tokenizer = gguf_tokenizer(bpe_metadata("qwen2", eos_token_id=len(VOCAB), eot_token_id=3), "x.gguf")
    assert tokenizer.eos_ids == {len(VOCAB), 3, len(VOCAB) + 1}  # the last by its name, <|im_end|>


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "none"}, "no tokenizer"),
        ({"model": "bert"}, "'bert' is not supported"),
        ({"pre": "some-new-kind"}, "'some-new-kind', which is not supported"),
        ({"pre": None}, "tokenizer.ggml.pre is None"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"bos_token_id": 10**6}, "bos_token_id is 1000000"),
        ({"token_type": [1, 1]}, "token_type is not a list of"),
        ({"merges": ["a nosuch"]}, "'a nosuch'"),
    ],
)
def test_a_tokenizer_that_cannot_be_built_is_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        gguf_tokenizer(bpe_metadata("qwen2") | {f"tokenizer.ggml.{k}": v for k, v in change.items()}, "x.gguf")


def test_a_file_without_tokenizer_still_opens(tmp_path: Path) -> None:
    with open_model(write_gguf(tmp_path / "m.gguf")) as model, pytest.raises(UserError, match="no tokenizer"):
        model.tokenizer()


def test_the_tokenizer_of_a_file_on_disk(tmp_path: Path) -> None:
    size = len(VOCAB) + 3
    path = write_gguf(tmp_path / "m.gguf", "qwen2", metadata=bpe_metadata("qwen2"), vocab=size)
    with open_model(path) as model:
        tokenizer = model.tokenizer()
    assert tokenizer.vocab_size == size
    assert tokenizer.encode("the dog's 中文") == QWEN2.encode("the dog's 中文")


@pytest.fixture(scope="module")
def sentencepiece_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    """A small SentencePiece BPE model trained as Llama's was, and our tokenizer from its pieces and scores."""
    spm = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("spm")
    (folder / "text").write_text("\n".join(CORPUS), encoding="utf-8")
    spm.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "m"),
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        character_coverage=0.98,
        minloglevel=2,
    )
    reference = spm.SentencePieceProcessor(model_file=str(folder / "m.model"))
    count = reference.vocab_size()

    def kind(i: int) -> int:
        return 2 if reference.is_unknown(i) else 3 if reference.is_control(i) else 6 if reference.is_byte(i) else 1

    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [reference.id_to_piece(i) for i in range(count)],
        "tokenizer.ggml.scores": [reference.get_score(i) for i in range(count)],
        "tokenizer.ggml.token_type": [kind(i) for i in range(count)],
        "tokenizer.ggml.bos_token_id": reference.bos_id(),
        "tokenizer.ggml.eos_token_id": reference.eos_id(),
        "tokenizer.ggml.unknown_token_id": reference.unk_id(),
    }
    return reference, gguf_tokenizer(metadata, "x.gguf")


@settings(max_examples=200)
@given(text=TEXTS.filter(lambda t: "\0" not in t and "\u2581" not in t and "<" not in t))
def test_sentencepiece_encoding_equals_sentencepiece(sentencepiece_pair: tuple[Any, Tokenizer], text: str) -> None:
    reference, ours = sentencepiece_pair
    ids = ours.encode(text, add_special=False)
    assert ids == reference.encode(text)
    assert ours.decode(ids) == text


def test_sentencepiece_adds_its_begin_token_and_streams_bytes(sentencepiece_pair: tuple[Any, Tokenizer]) -> None:
    reference, ours = sentencepiece_pair
    ids = ours.encode("the 🎈")
    assert ids[0] == reference.bos_id() and ours.decode(ids) == "the 🎈"
    stream = ours.stream()
    assert [p for p in (stream.push(i) for i in ids) if p][-1] == "🎈"


@pytest.mark.parametrize("text", ["the dog's 中文 text 42.\n", "thequickbrownfox"])
def test_long_texts_are_encoded_in_near_linear_time(sentencepiece_pair: tuple[Any, Tokenizer], text: str) -> None:
    """Were it quadratic, a minute for 100,000 characters, this test would hang and be named."""
    reference, ours = sentencepiece_pair
    long = text * (300_000 // len(text))
    assert ours.encode(long, add_special=False) == reference.encode(long)


def sentencepiece_metadata(pieces: list[str], types: list[int], **more: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": types,
        **{f"tokenizer.ggml.{name}": value for name, value in more.items()},
    }


@pytest.mark.parametrize("named", [{}, {"unknown_token_id": 0}])
def test_characters_that_neither_tokens_nor_bytes_spell_are_unknown(named: dict[str, int]) -> None:
    pieces = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "ab", "\n"]
    ours = gguf_tokenizer(sentencepiece_metadata(pieces, [2, 3, 3, 1, 1, 1, 1, 1], **named), "x.gguf")
    assert ours.encode("ab\nçéa", add_special=False) == [3, 6, 7, 0, 4]
    assert ours.encode("a<unk>b", add_special=False) == [3, 4, 0, 3, 5]
    assert ours.decode([3, 4, 0, 5]) == "ab"


def test_a_tokenizer_that_would_lose_characters_is_refused() -> None:
    pieces = ["<s>", "</s>", "\u2581", *(f"<0x{byte:02X}>" for byte in range(256))]
    metadata = sentencepiece_metadata(pieces, [3, 3, 1, *[6] * 256])
    assert len(gguf_tokenizer(metadata, "x.gguf").encode("é", add_special=False)) == 3
    pieces[100] = "x"
    with pytest.raises(UserError, match="neither an unknown token nor all bytes"):
        gguf_tokenizer(metadata, "x.gguf")


def save_hf(folder: Path, **config: Any) -> Path:
    backend = byte_level_reference(PRE_TOKENIZERS["llama-bpe"].patterns[0], whole_words=True)
    backend.add_special_tokens(SPECIALS)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_tokenizer_reads_its_begin_and_end_tokens(tmp_path: Path) -> None:
    save_hf(tmp_path, bos_token="<|start|>", eos_token={"content": "<|im_end|>"}, add_bos_token=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, len(VOCAB) + 1]}))
    tokenizer = hf_tokenizer(tmp_path)
    assert tokenizer.encode("hi the") == LLAMA3.encode("hi the")
    assert tokenizer.eos_ids == {5, len(VOCAB) + 1} and tokenizer.eos_text == "<|im_end|>"


def test_a_folder_with_a_tiktoken_file_alone_says_so(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes(b"IQ== 0\n")
    with pytest.raises(UserError, match=r"has a tiktoken.model and no tokenizer.json.*GGUF"):
        hf_tokenizer(tmp_path)


def test_a_folder_without_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        hf_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        hf_tokenizer(tmp_path)


@pytest.mark.parametrize("given", [-1, [5, -1], 10**6, 2**70, "5", [True], {"id": 5}])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_an_end_token_that_is_none_of_the_vocabulary_is_named(tmp_path: Path, name: str, given: Any) -> None:
    save_hf(tmp_path, bos_token="<|start|>")
    (tmp_path / name).write_text(json.dumps({"eos_token_id": given}))
    with pytest.raises(UserError, match=rf"{name}: eos_token_id is .*, not one of the \d+ tokens"):
        hf_tokenizer(tmp_path)


def test_an_end_token_that_only_the_embedding_has_is_no_damage(tmp_path: Path) -> None:
    save_hf(tmp_path, eos_token="<|im_end|>")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 599, "vocab_size": 600}))
    assert hf_tokenizer(tmp_path).eos_ids == {len(VOCAB) + 1}


# settings in tokenizer.json with which the library panics, as it loads or as it encodes
_TEMPLATE = [{"SpecialToken": {"id": "none", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
PANICS = [
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    {"post_processor": {"type": "TemplateProcessing", "single": _TEMPLATE, "pair": [], "special_tokens": {}}},
]


@pytest.mark.parametrize("settings_", PANICS)
def test_a_tokenizer_file_that_makes_the_library_panic_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], settings_: dict[str, Any]
) -> None:
    path = save_hf(tmp_path) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings_))
    with pytest.raises(UserError, match=r"cannot be read|cannot encode the text"):
        hf_tokenizer(tmp_path).encode("hi")
    assert capfd.readouterr().err == ""


def test_a_tokenizer_file_neither_cuts_nor_pads_a_prompt(tmp_path: Path) -> None:
    path = save_hf(tmp_path) / "tokenizer.json"
    text = "the quick brown fox " * 9
    whole = hf_tokenizer(tmp_path).encode(text)
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 5}
    pad = {"strategy": {"Fixed": 10**18}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    data = json.loads(path.read_text()) | {"truncation": cut, "padding": pad | {"pad_to_multiple_of": None}}
    path.write_text(json.dumps(data))
    assert hf_tokenizer(tmp_path).encode(text) == whole


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(UserError, match="the text is not valid UTF-8"):
        LLAMA3.encode("a\udcff")


def test_a_chat_template_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"chat_template.jinja: cannot be read"):
        hf_chat_template(tmp_path)


def test_chat_template_comes_from_its_own_file_before_the_config(tmp_path: Path) -> None:
    assert hf_chat_template(tmp_path) is None
    save_hf(tmp_path, chat_template=[{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}])
    assert hf_chat_template(tmp_path) == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert hf_chat_template(tmp_path) == "J"


def test_gemma_4_merges_over_whole_lines_as_llama_cpp_does() -> None:
    """Ids of llama.cpp b11549 by a file of this vocabulary."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
    parts = ["\n", "\n\n", "th", "the", "\u2581the", "\u2581\u2581", "he", "in", "ing", "\u2581a", "é"]
    tokens = [*special, *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *map(chr, range(33, 127)), *parts]
    merges = ["t h", "th e", "\u2581 the", "\u2581 \u2581", "h e", "i n", "in g", "\u2581 a"]
    keys = {
        "model": "gemma4", "tokens": tokens, "token_type": [3, 3, 3, 2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 262)],
        "merges": merges, "bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3,
    }  # fmt: skip
    tokenizer = gguf_tokenizer({f"tokenizer.ggml.{key}": value for key, value in keys.items()}, "m.gguf")
    for text, ids in {
        "the thing  is\n\n\na thé 漢\n the": [
            2, 360, 262, 359, 365, 362, 335, 345, 357, 357, 357, 327, 262, 359, 367, 262, 236, 194, 168, 357, 361,
        ],
        "  a\nthe": [2, 362, 327, 357, 360],
        "<|turn>user\nthe<turn|>\n": [2, 4, 347, 345, 331, 344, 357, 360, 5, 357],
        " the\n\nhe": [2, 361, 358, 363],
    }.items():  # fmt: skip
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text.replace("<|turn>", "").replace("<turn|>", "")
    assert set(tokenizer.eos_ids) == {1, 5}
