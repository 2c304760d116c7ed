"""Every error says what to do: whoever reads it does not know the code."""

import ast
import re

from house.code_rules import ROOT, list_sources, nodes_of

RAISED = {"UserError", "NoPlan", "NotPlanned", "StaleRegistry"}
# What follows the error in a sentence of its own, behind a colon or a semicolon: something to do, or what is allowed.
VERBS = (
    "add|ask|choose|close|convert|copy|correct|delete|end|fetch|free|give|install|leave|let|look|make|mend|name|open|"
    "pass|plan|raise|record|remove|replace|reset|run|save|say|set|start|take|try|unset|update|use|write"
)
ADVICE = re.compile(
    rf"(?:^leave out |[;:] (?:[\w-]+ ){{0,3}}?(?:{VERBS})\b"
    rf"|, (?:and|or) (?:{VERBS})\b|\b(?:{VERBS}) (?:it|them|again|--?\w)"
    r"|; (?:it is|they are|there (?:is|are)|\{\} (?:is|needs?))|choose from|see \{\}|\bneeds? (?:-|a |two )|\{advice\})"
)
# calls of Python's interface, parts of a message that another one ends, and what only clients of the server see
ELSEWHERE = ("runtime/texts/", "server/thread/")


def list_errors() -> list[tuple[str, str]]:
    """The text of every error that is written out where it is raised, with {} for what is filled in, and its place."""
    found = []
    for path in list_sources():
        name = path.relative_to(ROOT).as_posix()
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in RAISED and node.args:
                text = write_out(node.args[0])
                if text and not name.startswith(ELSEWHERE):
                    found.append((f"{name}:{node.lineno}", text))
    return found


def write_out(node: ast.expr) -> str:
    """The text of a literal, {} for what is filled in, {advice} where its name says so; "" for anything else."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if not isinstance(node, ast.JoinedStr):
        return ""
    advice = re.compile("advice|remedies|ANOTHER|FETCH_AGAIN|GIVE|DECIDED")
    parts = (
        str(p.value) if isinstance(p, ast.Constant) else "{advice}" if advice.search(ast.unparse(p)) else "{}"
        for p in node.values
    )
    return "".join(parts)


def test_every_error_says_what_to_do() -> None:
    errors = list_errors()
    assert len(errors) > 150
    lacking = [f"{place}: {text}" for place, text in errors if not ADVICE.search(text)]
    assert not lacking, "\n".join(lacking)
