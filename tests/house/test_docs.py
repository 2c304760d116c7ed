"""Pages name files that there are."""

import re

import pytest
from house.code_rules import FOLDERS, ROOT

FOLDERS_WITH_PAGES = (".", "docs", "benchmarks", "registries")
PAGES = sorted(page for folder in FOLDERS_WITH_PAGES for page in (ROOT / folder).glob("*.md"))
FOLDER = "|".join((*FOLDERS, "tests", "docs", "benchmarks", "scripts", "examples"))
NAMED = re.compile(rf"(?<![\w/.-])((?:{FOLDER})/[\w./-]*\w\.(?:py|md|json|h|cpp|png|gguf))")
LINKED = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_is_there(page) -> None:
    text = page.read_text(encoding="utf-8")
    named = {name for name in NAMED.findall(text) if not (ROOT / name).exists()}
    linked = {link for link in LINKED.findall(text) if not (page.parent / link).exists()}
    if page.name == "CHANGELOG.md":  # says what was
        named.clear()
    assert not named | linked
