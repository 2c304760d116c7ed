"""A hook of mkdocs: pages that lie elsewhere in the repository, and a reference made from the parsers and docstrings.

Pages of the repository link to each other by file; on the site some have other names, and code is not there: links to
it become its name. GitHub begins a list or a table right below a paragraph; the site's Markdown wants an empty line.
"""

import argparse
import inspect
import posixpath
import re
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = {  # in the repository -> on the site
    "README.md": "index.md",
    "registries/FORMAT.md": "registry-format.md",
    "benchmarks/README.md": "benchmarks.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
PYTHON = (  # what programs may rely on
    ("pshard.session.load", "load"),
    ("pshard.runtime.engine", "Engine"),
    ("pshard.runtime.sampling", "Sampling"),
    ("pshard.models.model_file", "open_model"),
    ("pshard.hub.fetch_model", "fetch_model"),
    ("pshard.errors", "UserError"),
    ("pshard.errors", "StepFailed"),
)
_ITEM = re.compile(r" *([-*]|\d+\.) ")
_LINK = re.compile(r"(!?\[([^\]]*)\]\()([^)\s#]*)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that do not lie in docs/."""
    from mkdocs.structure.files import File

    made = {there: (ROOT / here).read_text(encoding="utf-8") for here, there in ELSEWHERE.items()}
    made |= {"commands.md": describe_commands(), "python.md": describe_python()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page's links as they are on the site, and its lists and tables apart from paragraphs."""
    site = page.file.src_uri
    here = next((place for place, there in ELSEWHERE.items() if there == site), f"docs/{site}")
    return part_blocks(_LINK.sub(lambda match: _turn(match, posixpath.dirname(here)), markdown))


def part_blocks(markdown: str) -> str:
    """An empty line before each list and table that follows a paragraph, and four spaces for each level of a list."""
    parted, before, in_code = list[str](), "", False
    for line in markdown.split("\n"):
        in_code ^= line.lstrip().startswith("```")
        begins = _ITEM.match(line) or line.startswith("|")
        if begins and not in_code and before and not (_ITEM.match(before) or before.startswith(("#", "|", " "))):
            parted.append("")
        nested = not in_code and _ITEM.match(line) and line.startswith("  ")
        parted.append(line.replace("  ", "    ", 1) if nested and not line.startswith("    ") else line)
        before = line
    return "\n".join(parted)


def _turn(match: re.Match[str], folder: str) -> str:
    """A link from a page in that folder of the repository."""
    target, anchor = match[3], match[4] or ""
    if not target or "://" in target or target.startswith("mailto:"):
        return match[0]
    place = posixpath.normpath(posixpath.join(folder, target))
    if place == "docs/README.md":
        place = "README.md"
    if place in ELSEWHERE:
        return f"{match[1]}{ELSEWHERE[place]}{anchor})"
    if place.startswith("docs/"):
        return f"{match[1]}{place.removeprefix('docs/')}{anchor})"
    return f"`{place}`" if match[2].endswith((".py", ".json", "/")) else match[2]


def describe_commands() -> str:
    """A chapter for each command, from its parser."""
    from pshard.commands.program.one_program import COMMANDS

    text = ["# Commands", "", "Made from the programs themselves: `pshard COMMAND --help` says the same.", ""]
    for name, (module, what) in COMMANDS.items():
        text += [f"## pshard {name}", f"{what[0].upper()}{what[1:]}.", ""]
        text += describe_parser(find_parser(module))
        if name == "bench":
            text += ["### pshard bench --serve", "Of a server: [serving-bench.md](serving-bench.md).", ""]
            text += describe_parser(find_parser("everyday.cli_serve_bench"))
    return "\n".join(text)


def find_parser(module: str) -> argparse.ArgumentParser:
    """The parser of a command. Raises AttributeError for one that makes none."""
    found = import_module(f"pshard.commands.{module}")
    if not hasattr(found, "make_parser"):
        found = import_module("pshard.commands.plan_flags")
    return found.make_parser()


def describe_parser(parser: argparse.ArgumentParser) -> list[str]:
    """A row for each flag that help shows."""
    rows = ["| flag | does |", "|---|---|"]
    for action in parser._actions:
        if action.help in (None, argparse.SUPPRESS):
            continue
        names = ", ".join(f"`{flag}`" for flag in action.option_strings) or f"`{action.metavar or action.dest}`"
        if action.option_strings and action.nargs != 0:
            value = action.metavar or (
                f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper()
            )
            names += f" `{value if isinstance(value, str) else ' '.join(value)}`"
        said = (action.help or "") % {"default": action.default, "prog": parser.prog}
        rows.append(f"| {_cell(names)} | {_cell(said)} |")
    return [*rows, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def describe_python() -> str:
    """What programs may import, from signatures and docstrings."""
    text = ["# Python", "", "Made from the docstrings. Examples: [reference.md](reference.md#python), `examples/`.", ""]
    for module, name in PYTHON:
        found = getattr(import_module(module), name)
        text += [f"## {name}", f"```python\nfrom {module} import {name}\n```", *_describe(found)]
        if inspect.isclass(found) and not issubclass(found, Exception):
            for method, value in inspect.getmembers(found, inspect.isfunction):
                if not method.startswith("_") and value.__doc__:
                    text += [f"### {name}.{method}", *_describe(value)]
    return "\n".join(text)


def _describe(found: Any) -> list[str]:
    signature = "" if inspect.isclass(found) else f"`{found.__name__}{inspect.signature(found)}`\n"
    body = textwrap.dedent(inspect.getdoc(found) or "").replace("<", "&lt;")
    return [signature, re.sub(r"^(Args|Returns|Raises|Attributes):$", r"**\1**\n", body, flags=re.M), ""]
