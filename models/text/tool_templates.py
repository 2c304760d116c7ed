"""How chat templates take tools: as `tools`, or as older ones do, as `functions`. No Jinja here."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

FUNCTIONS = re.compile(r"\{[{%][^{}%]*\bfunctions\b")  # read within a template
LOOP = re.compile(r"\bin\s+functions\b")


def takes_tools(template: str) -> bool:
    """Whether a template says something of tools itself, by either name."""
    return "tools" in template or FUNCTIONS.search(template) is not None


def give_functions(template: str, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Variables of a template that takes tools as `functions`: a list where it goes through one, else JSON as text, ""
    without tools; and `datetime`, which is the day alone: a second would change each prompt's beginning. None for other
    templates."""
    if not FUNCTIONS.search(template):
        return {}
    told: Any = list(tools or ())
    if not LOOP.search(template):
        told = json.dumps(told, indent=2, ensure_ascii=False) if tools else ""
    return {"functions": told, "datetime": datetime.now().strftime("%b %d %Y")}
