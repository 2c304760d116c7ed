"""Says what is wrong with a grammar in the words and lines of whoever wrote it.

llguidance reads Lark alone: of GBNF its errors quote rules that nobody wrote.
"""

import re

EXCERPT = re.compile(r"\s*(\d+ \|.*|\^+)?\s*")  # a line of Lark that is quoted, or what points into the one above
PLACE = re.compile(r"at (\d+)\(\d+\): ")
NAME = re.compile(r"[A-Za-z_][\w-]*(?=\s*(?:::=|:))")
MOST = 160  # letters of a rule that are shown


def describe_error(error: Exception | str, given: str, lark: str) -> str:
    """One line on an error of llguidance about a grammar: why, and the rule as it was given. lark: what was read for
    it, the same text where that was given."""
    told = str(error).partition("<state>")[0]
    if at := getattr(getattr(error, "pos", None), "pos", None):  # an error of what reads GBNF
        return _join(told.rpartition(" at line ")[0], _line_at(given, given.count("\n", 0, at)))
    if lost := re.fullmatch(r"Rule '(.+)' not found", told):
        return _join(f"there is no rule {lost[1]!r}", _line_with(given, lost[1]))
    place = PLACE.search(told)
    why = _read_why(PLACE.sub("", told, count=1))
    if place is None:
        return why
    number = int(place[1]) - 1
    return _join(why, _line_at(given, number) if lark == given else _find_rule(given, lark, number))


def describe_regex(error: str) -> str:
    """The same of a regular expression: why alone, as all of it is one rule."""
    return _read_why(PLACE.sub("", error.partition("<state>")[0], count=1))


def _read_why(told: str) -> str:
    """What llguidance says, without the Lark that it quotes and without the expression a second time."""
    kept = [line.strip() for line in told.splitlines() if not EXCERPT.fullmatch(line)]
    text = " ".join(kept)
    found = re.fullmatch(r'(invalid regex ".*") \(in regex\): (?:regex parse error: .* error: )?(.*)', text)
    if text == "NoExtensionBias":
        return "no text ends by it"
    return f"{found[1]}: {found[2]}" if found else text


def _find_rule(given: str, lark: str, number: int) -> str:
    """The rule of a GBNF grammar that a line of its Lark was made of: names lose their case and their hyphens there."""
    above = lark.splitlines()[: number + 1]
    name = next((match[0] for line in reversed(above) if (match := NAME.match(line))), "")
    name = "root" if name == "start" else name
    return next((line for line in given.splitlines() if _name_of(line) == _plain(name)), "")


def _name_of(line: str) -> str:
    found = NAME.match(line.strip())
    return _plain(found[0]) if found else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _line_at(text: str, number: int) -> str:
    lines = text.splitlines()
    return lines[number] if number < len(lines) else ""


def _line_with(text: str, name: str) -> str:
    word = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
    return next((line for line in text.splitlines() if word.search(line)), "")


def _join(why: str, rule: str) -> str:
    rule = rule.strip()
    if len(rule) > MOST:
        rule = f"{rule[:MOST]}…"
    return f"{why}, in the rule: {rule}" if rule else why
