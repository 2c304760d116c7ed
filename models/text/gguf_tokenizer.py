"""The tokenizer inside a GGUF file, built for the `tokenizers` library.

Keys `tokenizer.ggml.*`: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pshard.errors import UserError
from pshard.models.stored import FETCH_AGAIN
from pshard.models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

KINDS = ("gpt2", "llama", "gemma4")
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # values of tokenizer.ggml.token_type

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
_CASED_LETTERS = (  # of alphabets that have cases, as deepseek-llm lists them
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ\u1f5f-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌ\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-\u212dℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CASED_CONTRACTED = _CASED.replace("|", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?|")
_NOT_HAN = _CASED_CONTRACTED.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")
_V3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
)


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before BPE: patterns applied one after another, and what else goes with them."""

    patterns: tuple[str, ...]
    nfc: bool = False  # composes characters first
    whole_words: bool = False  # a piece that is a token is taken as it is, whatever the merges say
    adds_bos: bool = False  # when the file does not say


_LLAMA3 = PreTokenizer((_CONTRACTIONS + _WORDS + r"\p{N}{1,3}|" + _MARKS + _TAIL,), whole_words=True, adds_bos=True)
_QWEN2 = PreTokenizer((_CONTRACTIONS + _WORDS + r"\p{N}|" + _MARKS + _TAIL,), nfc=True)
_QWEN35 = (  # marks are of the words that they stand in
    _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _TAIL
)
_LONE_ENDS = r"|\s*[\r\n]|\s+(?!\S)|\s+"  # a line's end is a piece of its own
_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
_DEEPSEEK_V3 = PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _V3_WORDS + _TAIL))
_SMOLLM = PreTokenizer((r"\p{N}", _GPT2))
_GPT4O = PreTokenizer((_CASED_CONTRACTED + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _TAIL,))
_BAILING = PreTokenizer((r"'(?i:[sdmt]|ll|ve|re)|" + _WORDS + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _LONE_ENDS,))
# The patterns are those of the models' own tokenizer.json; "default" is what GGUF files mean by it.
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "smaug-bpe": PreTokenizer(_LLAMA3.patterns),
    "dbrx": PreTokenizer(_LLAMA3.patterns),
    "seed-coder": PreTokenizer((_CONTRACTIONS + _WORDS + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _TAIL,)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "tekken": PreTokenizer((_CASED + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _TAIL,), whole_words=True, adds_bos=True),
    "glm4": PreTokenizer(_LLAMA3.patterns, whole_words=True),
    "chatglm-bpe": PreTokenizer(_LLAMA3.patterns),
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "minimax-m2": _GPT4O,
    "tiny_aya": PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4O.patterns)),
    "lfm2": _LLAMA3,
    "olmo": PreTokenizer((_GPT2,)),
    "stablelm2": PreTokenizer(_QWEN2.patterns),
    "hunyuan": PreTokenizer(_QWEN2.patterns),
    "hunyuan-dense": _DEEPSEEK_V3,
    "hy_v4": _DEEPSEEK_V3,
    "exaone": _SMOLLM,
    "exaone4": PreTokenizer((_GPT2,)),
    "exaone-moe": PreTokenizer(
        (
            _CONTRACTIONS
            + r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
            + _LONE_ENDS,
        )
    ),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "jais-2": PreTokenizer((_CONTRACTIONS + _WORDS + r"\p{N}{1,3}|" + _MARKS + r"\s*[\r\n]+|" + _SPACES + r"|\s{1}",)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", *_QWEN2.patterns)),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            "[一-龥ࠀ-一가-\ud7ff]+",
            r"\p{N}+",
        )
    ),
    "deepseek-v3": _DEEPSEEK_V3,
    "joyai-llm": _DEEPSEEK_V3,  # what converters call DeepSeek's own since transformers 5
    "kimi-k2": PreTokenizer((r"[\p{Han}]+|" + _NOT_HAN + r"\p{N}{1,3}|" + _MARKS + _TAIL,), whole_words=True),
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "command-r": PreTokenizer(_SMOLLM.patterns, nfc=True),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}

# Control tokens that end a turn; files name only one end token, and instruct models use several.
_TURN_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<end_of_turn>",
    "<|END_OF_TURN_TOKEN|>",
    "<turn|>",
)
# Where both of these are, as in gpt-oss, a turn ends with one of them, and "<|end|>" only a message within it.
_HARMONY_ENDS = ("<|return|>", "<|call|>")


def gguf_tokenizer(metadata: dict[str, Any], where: str) -> Tokenizer:
    """Build the tokenizer from a GGUF file's metadata. Raises UserError when there is none, or an unsupported one."""
    kind = metadata.get("tokenizer.ggml.model", "none")
    if kind == "none":
        raise UserError(f"{where}: the model has no tokenizer; give tokens only, as ids")
    if kind not in KINDS:
        supported = ", ".join(KINDS)
        raise UserError(f"{where}: tokenizer {kind!r} is not supported; supported: {supported}; give token ids instead")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise UserError(f"{where}: tokenizer.ggml.tokens is missing; give token ids instead")
    types = _list_of(metadata, "token_type", int, len(tokens), where) or [_NORMAL] * len(tokens)
    if kind == "gpt2":
        backend, adds_bos = _byte_level_bpe(metadata, tokens, where)
    elif kind == "gemma4":
        backend, adds_bos = _line_bpe(metadata, tokens, types, where), True
    else:
        backend, adds_bos = _sentencepiece_bpe(metadata, tokens, types, where), True
    _add_special_tokens(backend, tokens, types)
    bos, eos = (_token_id(metadata, f"{name}_token_id", len(tokens), where) for name in ("bos", "eos"))
    before = [bos] if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else []
    after = [eos] if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False) else []
    surround(backend, before, after)
    ends = [eos, *(_token_id(metadata, f"{name}_token_id", len(tokens), where) for name in ("eot", "eom"))]
    control = {t: i for i, (t, k) in enumerate(zip(tokens, types)) if k == _CONTROL}
    harmony = control.keys() >= set(_HARMONY_ENDS)
    turn_ends = {*_TURN_ENDS, *_HARMONY_ENDS} - {"<|end|>"} if harmony else set(_TURN_ENDS)
    ends += [i for t, i in control.items() if t in turn_ends]
    return Tokenizer(backend, bos, tuple(dict.fromkeys(i for i in ends if i is not None)))


def surround(backend: "tokenizers.Tokenizer", before: list[int], after: list[int]) -> None:
    """Make the tokenizer put these token ids around every text."""
    from tokenizers.processors import TemplateProcessing

    names = {i: backend.id_to_token(i) for i in before + after}
    template = [*(names[i] for i in before), "$A", *(names[i] for i in after)]
    backend.post_processor = TemplateProcessing(single=template, special_tokens=[(n, i) for i, n in names.items()])


def _byte_level_bpe(metadata: dict[str, Any], tokens: list[str], where: str) -> tuple["tokenizers.Tokenizer", bool]:
    """Byte-level BPE, and whether it adds a begin token when the file does not say."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = metadata.get("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        what = f"tokenizer.ggml.pre is {name!r}, which is not supported (supported: {', '.join(PRE_TOKENIZERS)})"
        raise UserError(f"{where}: {what}; give token ids instead")
    pre = PRE_TOKENIZERS[name]
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = _read_merges(metadata, vocab, where)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre.whole_words))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


def _read_merges(metadata: dict[str, Any], vocab: dict[str, int], where: str) -> list[tuple[str, str]]:
    """The pairs of tokens that merge, the first ones first. Raises UserError for others."""
    pairs = [tuple(merge.split(" ")) for merge in _list_of(metadata, "merges", str, None, where) or []]
    for pair in pairs:
        if len(pair) != 2 or any(part not in vocab for part in (*pair, "".join(pair))):
            raise UserError(
                f"{where}: tokenizer.ggml.merges has {' '.join(pair)!r}, which is no merge of two tokens; {FETCH_AGAIN}"
            )
    return [(pair[0], pair[1]) for pair in pairs]


def _line_bpe(metadata: dict[str, Any], tokens: list[str], types: list[int], where: str) -> "tokenizers.Tokenizer":
    """BPE by ranks over whole lines, whose spaces are a character of their own, as SentencePiece has it: Gemma 4's.
    Runs of newlines stand apart, and are one token where there is such; what no token spells are bytes."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = _unknown_token(metadata, tokens, types, where)
    model = models.BPE(
        vocab=vocab,
        merges=_read_merges(metadata, vocab, where),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
        ignore_merges=True,
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _sentencepiece_bpe(
    metadata: dict[str, Any], tokens: list[str], types: list[int], where: str
) -> "tokenizers.Tokenizer":
    """SentencePiece BPE: of two neighbours, those whose union has the best score merge first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _list_of(metadata, "scores", float, len(tokens), where)
    if scores is None:
        raise UserError(f"{where}: tokenizer.ggml.scores is missing; give token ids instead")
    unknown = _unknown_token(metadata, tokens, types, where)
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=_merges_by_score([(t, s) for t, s, k in zip(tokens, scores, types) if k == _NORMAL]),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prepend = [normalizers.Prepend("\u2581")] if prefix else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "\u2581")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _unknown_token(metadata: dict[str, Any], tokens: list[str], types: list[int], where: str) -> int | None:
    """What a character becomes that neither tokens nor bytes spell: the first token when the file does not say.

    Raises UserError where there is no such token and some bytes have none: texts would lose characters.
    """
    unknown = _token_id(metadata, "unknown_token_id", len(tokens), where)
    if unknown is None and types[0] == _UNKNOWN:
        unknown = 0
    if unknown is None and not {f"<0x{byte:02X}>" for byte in range(256)} <= set(tokens):
        raise UserError(f"{where}: the tokenizer has neither an unknown token nor all bytes; give token ids instead")
    return unknown


def _merges_by_score(pieces: list[tuple[str, float]]) -> list[tuple[str, str]]:
    """All ways to make a piece of two others, best score first."""
    known = {piece for piece, _ in pieces}
    merges = []
    for piece, score in pieces:
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in known and right in known:
                merges.append((-score, left, right))
    merges.sort(key=lambda merge: merge[0])  # stable: the shortest left part of a piece comes first
    return [(left, right) for _, left, right in merges]


def _add_special_tokens(backend: "tokenizers.Tokenizer", tokens: list[str], types: list[int]) -> None:
    from tokenizers import AddedToken

    for kind in (_CONTROL, _UNKNOWN, _USER_DEFINED):
        special = kind != _USER_DEFINED
        named = [AddedToken(t, normalized=False, special=special) for t, k in zip(tokens, types) if k == kind and t]
        (backend.add_special_tokens if special else backend.add_tokens)(named)


def _list_of(metadata: dict[str, Any], name: str, item: type, count: int | None, where: str) -> list | None:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None:
        return None
    if (
        not isinstance(values, list)
        or (values and type(values[0]) is not item)
        or len(values) != (count or len(values))
    ):
        wanted = f"a list of {count} values" if count else "a list"
        what = f"tokenizer.ggml.{name} is not {wanted} of type {item.__name__}: the file is damaged"
        raise UserError(f"{where}: {what}; {FETCH_AGAIN}")
    return values


def _token_id(metadata: dict[str, Any], name: str, count: int, where: str) -> int | None:
    token = metadata.get(f"tokenizer.ggml.{name}")
    if token is None:
        return None
    if type(token) is not int or not 0 <= token < count:
        raise UserError(f"{where}: tokenizer.ggml.{name} is {token!r}, not one of the {count} tokens; {FETCH_AGAIN}")
    return token
