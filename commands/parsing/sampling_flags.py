"""How tokens are drawn, said with llama.cpp's flags, and what they may be: --grammar and --json-schema."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pshard.errors import UserError, name_cause

if TYPE_CHECKING:
    from pshard.runtime.sampling import Sampling

NAMES = {"temp": "temperature", "top-k": "top_k", "top-p": "top_p", "min-p": "min_p", "nucleus": "top_p"}
LETTERS = {"e": "penalties", "k": "top_k", "p": "top_p", "m": "min_p", "t": "temperature"}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser."""
    add_sampler_flags(parser)
    _add_form_flags(parser)


def add_sampler_flags(parser: argparse.ArgumentParser) -> None:
    """Those that say how tokens are drawn."""
    draw = parser.add_argument_group("sampling")
    draw.add_argument("--temp", type=float, default=0.8, help="temperature; 0 is greedy (default 0.8)")
    draw.add_argument("--top-k", type=int, default=40, help="keep the k likeliest; 0 is off (default 40)")
    draw.add_argument("--top-p", type=float, default=0.95, help="keep the likeliest of this mass (default 0.95)")
    draw.add_argument(
        "--min-p", type=float, default=0.05, help="keep what reaches this share of the best (default 0.05)"
    )
    draw.add_argument("-s", "--seed", type=int, help="seed; the same seed gives the same text (-1: another each time)")
    draw.add_argument(
        "--samplers", metavar="NAME;NAME", default="",
        help="the order of samplers (default penalties;top_k;top_p;min_p;temperature); those left out do nothing",
    )  # fmt: skip
    draw.add_argument("--sampling-seq", metavar="LETTERS", default="", help="the same by letters (default ekpmt)")
    draw.add_argument(
        "--repeat-penalty", type=float, default=1.0, help="divide logits of tokens that came before; 1 is off"
    )
    draw.add_argument("--presence-penalty", type=float, default=0.0, help="take off of tokens that came; 0 is off")
    draw.add_argument("--frequency-penalty", type=float, default=0.0, help="take off for each time; 0 is off")
    draw.add_argument(
        "--repeat-last-n", type=int, default=64, help="tokens that penalties look at; -1 is all (default 64)"
    )
    draw.add_argument(
        "-l", "--logit-bias", action="append", default=[], type=_bias, metavar="ID+BIAS",
        help="make a token likelier or less likely, as 15043+1 or 15043-1; 15043-inf forbids it",
    )  # fmt: skip


def _add_form_flags(parser: argparse.ArgumentParser) -> None:
    only = parser.add_argument_group("form of the answer (needs llguidance: pip install llguidance)")
    only.add_argument("--grammar", metavar="GBNF", help="a grammar in GBNF or Lark that the answer follows")
    only.add_argument("--grammar-file", type=Path, metavar="FILE", help="the same from a file")
    only.add_argument("-j", "--json-schema", metavar="SCHEMA", help="a JSON schema that the answer follows")


def make_sampling(args: argparse.Namespace) -> "Sampling":
    """What the flags say. Raises UserError for values that mean nothing."""
    from pshard.runtime.sampling import Sampling
    from pshard.runtime.sampling.chain import Penalties

    if args.samplers and args.sampling_seq:
        raise UserError("--samplers and --sampling-seq exclude each other; give one")
    penalties = Penalties(args.repeat_penalty, args.frequency_penalty, args.presence_penalty, args.repeat_last_n)
    order = _read_order(args.samplers, args.sampling_seq)
    more: dict[str, Any] = {"samplers": order} if order else {}
    seed = None if args.seed == -1 else args.seed
    return Sampling(
        args.temp, args.top_k, args.top_p, args.min_p, seed, penalties, tuple(args.logit_bias), **more
    )  # fmt: skip


def read_grammar(args: argparse.Namespace) -> tuple[str, str] | None:
    """What the answer must follow: ("grammar" or "schema", its text); None for anything. Raises UserError."""
    given = [name for name in ("grammar", "grammar_file", "json_schema") if getattr(args, name) is not None]
    if len(given) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in given)
        raise UserError(f"{flags} exclude each other; give one")
    if not given:
        return None
    from pshard.runtime.sampling.grammar import check_installed

    check_installed()
    if args.json_schema is not None:
        return "schema", args.json_schema
    if args.grammar is not None:
        return "grammar", args.grammar
    try:
        return "grammar", args.grammar_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--grammar-file: cannot read {args.grammar_file}: {name_cause(error)}; give a text file in UTF-8"
        ) from None


def _read_order(names: str, letters: str) -> tuple[str, ...]:
    """Samplers by their names, or by letters; none where neither is given."""
    if letters:
        strange = next((letter for letter in letters if letter not in LETTERS), None)
        if strange:
            raise UserError(f"--sampling-seq: there is no sampler {strange!r} here; there are {', '.join(LETTERS)}")
        return tuple(LETTERS[letter] for letter in letters)
    words = [word.strip() for word in re.split("[;,]", names) if word.strip()]
    return tuple(NAMES.get(word, word) for word in words)


def _bias(text: str) -> tuple[int, float]:
    match = re.fullmatch(r"(\d+)([+-](?:\d+(?:\.\d*)?|\.\d+|inf))", text.strip())
    if not match or match[2] == "+inf":
        raise argparse.ArgumentTypeError(f"{text!r} is not a token id with what to add to it (15043+1, 15043-inf)")
    return int(match[1]), float(match[2])
