"""Pages name files that there are."""

import ast
import re
import tomllib

import pytest
from house.code_rules import FOLDERS, ROOT, list_sources, nodes_of

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


def test_the_readme_is_read_in_one_sitting() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 10_000


IMPORTED = {"nvidia-ml-py": "pynvml"}  # where the package is called otherwise


def imports_by_file() -> dict[str, set[str]]:
    """Names of packages that each of our modules imports, by its path."""
    found = {}
    for path in list_sources():
        nodes = nodes_of(path)
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
        found[path.relative_to(ROOT).as_posix()] = {name.partition(".")[0] for name in names}
    return found


def test_the_table_of_dependencies_names_each_with_every_place_that_imports_it() -> None:
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    rows = re.findall(r"^\| ([\w-]+) \| .* \| (.*) \|$", (ROOT / "docs/dependencies.md").read_text("utf-8"), re.M)
    table = {name: re.findall(r"`([\w/.]+)`", places) for name, places in rows}
    imports, wrong = imports_by_file(), []
    for package in (re.split("[<>=;]", line)[0] for line in asked):
        files = [path for path, names in imports.items() if IMPORTED.get(package, package) in names]
        places = table.get(package, [])
        wrong += [f"{package}: {path} is not named" for path in files if not path.startswith(tuple(places) or "/")]
        wrong += [f"{package}: not in {p}" for p in places if not any(path.startswith(p) for path in files)]
        wrong += [f"{package} is imported nowhere"] * (not files)
    assert not wrong
