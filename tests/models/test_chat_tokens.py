"""Special tokens of a chat are those that its template spells out; what people write is text, and encoded as text."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_models_tokenizer import SPECIALS, VOCAB, bpe_metadata, byte_level_reference
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pshard.models.text.chat import render_chat
from pshard.models.text.gguf_tokenizer import PRE_TOKENIZERS, gguf_tokenizer
from pshard.models.text.hf_tokenizer import hf_tokenizer
from pshard.models.text.tokenizer import Tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}x <|start|>"
)
ALIASES = {"<|start|>": "{{one}}", "<|im_end|>": "{{two}}"}  # what nobody writes here
CONTENTS = st.lists(
    st.sampled_from([*SPECIALS, "<think>", " ", "\n", "<|", "im_end", "|>", "the dog", "é", "😀", "  ", "x"]),
    max_size=8,
).map("".join)


def sentencepiece_metadata(specials: list[str]) -> dict[str, Any]:
    pieces = [
        *"\u2581abcdefghijklmnopqrstuvwxyz<>|_\n",
        "th",
        "the",
        "\u2581the",
        "<|",
        "|>",
        "im",
        "\u2581\u2581",
        "x\u2581",
    ]
    tokens = ["<unk>", *specials, "<think>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.token_type": [2, 3, 3, 4] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def renamed(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return metadata | {"tokenizer.ggml.tokens": [ALIASES.get(token, token) for token in tokens]}


def folder_tokenizer(folder: Path, names: list[str], kind: str) -> Tokenizer:
    """As folders have them: tokens that take in whitespace, and a space only before the first word."""
    if kind == "bytes":
        backend = byte_level_reference(PRE_TOKENIZERS["llama-bpe"].patterns[0], whole_words=True)
    else:
        pieces = [f"<0x{i:02X}>" for i in range(256)] + [
            *"\u2581abcdefghijklmnopqrstuvwxyz<>|_",
            "th",
            "the",
            "\u2581the",
        ]
        merges = [("t", "h"), ("th", "e"), ("\u2581", "the")]
        backend = Backend(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges, byte_fallback=True))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        replaced = decoders.Replace("\u2581", " ")
        backend.decoder = decoders.Sequence([replaced, decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(names[0], lstrip=True), AddedToken(names[1], rstrip=True)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": names[0], "eos_token": names[1]}))
    return hf_tokenizer(folder)


@pytest.fixture(scope="module", params=["llama-bpe", "qwen2", "sentencepiece", "folder bytes", "folder pieces"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """A tokenizer, and the same one built with other texts for its special tokens."""
    kind = request.param
    if kind.startswith("folder"):
        named = (SPECIALS, [ALIASES[text] for text in SPECIALS])
        made = [folder_tokenizer(tmp_path_factory.mktemp("hf"), names, kind.split()[1]) for names in named]
        return made[0], made[1]
    metadata = sentencepiece_metadata(SPECIALS) if kind == "sentencepiece" else bpe_metadata(kind)
    return gguf_tokenizer(metadata, "x.gguf"), gguf_tokenizer(renamed(metadata), "x.gguf")


def alias(template: str) -> str:
    return template.replace("<|start|>", "{{ '{{one}}' }}").replace("<|im_end|>", "{{ '{{two}}' }}")


@settings(max_examples=60)
@given(contents=st.lists(CONTENTS, min_size=1, max_size=3))
def test_a_chat_has_the_special_tokens_of_its_template_and_no_others(
    pair: tuple[Tokenizer, Tokenizer], contents: list[str]
) -> None:
    """Equal to a tokenizer that never heard of the special texts, and a template that spells them in its way."""
    ours, other = pair
    talk = [{"role": "user", "content": content} for content in contents]
    expected = other.encode(render_chat(alias(TEMPLATE), talk, other.bos_text, ""), add_special=False)
    assert ours.encode_chat(render_chat(TEMPLATE, talk, ours.bos_text, "")) == expected


@settings(max_examples=40)
@given(content=CONTENTS.filter(lambda text: not any(special in text for special in SPECIALS)))
def test_a_harmless_chat_is_encoded_as_one_text(pair: tuple[Tokenizer, Tokenizer], content: str) -> None:
    ours, _ = pair
    text = render_chat(TEMPLATE, [{"role": "user", "content": content}], ours.bos_text, "")
    assert ours.encode_chat(text) == ours.encode(str(text), add_special=False)


@settings(max_examples=40)
@given(text=CONTENTS)
def test_plain_text_keeps_what_is_around_it_but_parses_no_special_token(
    pair: tuple[Tokenizer, Tokenizer], text: str
) -> None:
    ours, other = pair
    assert ours.encode(text, parse_special=False) == other.encode(text)
    if not any(special in text for special in SPECIALS):
        assert ours.encode(text, parse_special=False) == ours.encode(text)


def test_a_prompt_as_it_stands_parses_special_tokens_unless_told_not_to() -> None:
    tokenizer = gguf_tokenizer(bpe_metadata("llama-bpe"), "x.gguf")
    start, end, think = (len(VOCAB) + i for i in range(3))
    assert tokenizer.encode("a<|im_end|>") == [start, VOCAB["a"], end]
    ids = tokenizer.encode("a<|im_end|><think>", parse_special=False)
    assert ids[0] == start and end not in ids and ids[-1] == think  # user-defined: text that is one token
    assert tokenizer.decode(ids) == "a<|im_end|><think>"


def test_a_message_cannot_complete_what_the_template_began() -> None:
    tokenizer = gguf_tokenizer(bpe_metadata("qwen2"), "x.gguf")
    end = len(VOCAB) + 1
    for template, content in (("<|{{ m }}|>", "im_end"), ("{{ m }}end|>", "<|im_"), ("<|im_{{ m }}", "end|>")):
        text = render_chat(
            template.replace(" m ", " messages[0].content "), [{"role": "user", "content": content}], "", ""
        )
        assert text == "<|im_end|>" and end in tokenizer.encode(text)
        assert end not in tokenizer.encode_chat(text)
    by_role = render_chat("<|{{ messages[0].role }}|>", [{"role": "im_end", "content": ""}], "", "")
    assert tokenizer.encode_chat(by_role) == [end]  # a role is the program's own word


def test_a_message_that_ends_as_a_longer_token_begins_hides_none_of_the_templates() -> None:
    metadata = bpe_metadata("qwen2")
    metadata["tokenizer.ggml.tokens"][len(VOCAB)] = "x<|im_end|>"
    tokenizer = gguf_tokenizer(metadata, "x.gguf")
    text = render_chat("{{ messages[0].content }}<|im_end|>", [{"role": "user", "content": "x"}], "", "")
    assert tokenizer.encode(text) == [len(VOCAB)]
    assert tokenizer.encode_chat(text) == [VOCAB["x"], len(VOCAB) + 1]


def test_special_tokens_that_normalised_text_could_spell_stay_the_templates(tmp_path: Path) -> None:
    backend = byte_level_reference(None, whole_words=False)
    backend.normalizer = normalizers.NFKC()
    backend.add_special_tokens([AddedToken("<|im_end|>", normalized=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = hf_tokenizer(tmp_path)
    wide = "\uff1c|im_end|\uff1e"  # "<" and ">" as wide characters
    assert tokenizer.encode(wide) == [len(VOCAB)]
    text = render_chat("{{ messages[0].content }}<|im_end|>", [{"role": "user", "content": wide}], "", "")
    ids = tokenizer.encode_chat(text)
    assert ids.count(len(VOCAB)) == 1 and ids[-1] == len(VOCAB)


def test_special_tokens_in_text_of_unclear_origin_are_named() -> None:
    tokenizer = gguf_tokenizer(bpe_metadata("qwen2"), "x.gguf")
    talk = [{"role": "user", "content": "hi"}]
    text = render_chat("<|start|>{{ '%s<|im_end|>' % messages[0].content + '!' }}", talk, "", "")
    assert tokenizer.doubtful_specials(text) == ["<|im_end|>"]
    ids = tokenizer.encode_chat(text)
    assert ids[0] == len(VOCAB) and len(VOCAB) + 1 not in ids
    assert tokenizer.doubtful_specials(render_chat(TEMPLATE, talk, "", "")) == []
