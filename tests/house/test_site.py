"""The site is built from the pages with every link right; its reference is what programs and docstrings say."""

import os
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from house.code_rules import ROOT, list_sources

SITE = runpy.run_path(str(ROOT / "scripts" / "site_pages.py"))
# what is imported under another name than it is installed by
MODULES = {"nvidia-ml-py": "pynvml", "huggingface_hub": "huggingface_hub", "prompt_toolkit": "prompt_toolkit"}


@pytest.mark.slow
def test_the_site_builds_and_no_link_leads_nowhere(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed; pip install '.[docs]'")
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "index.html").read_text()
    assert "first-steps.html" in page and "hub.html" in page


def test_the_reference_has_every_command_and_its_flags() -> None:
    text = SITE["describe_commands"]()
    for name in ("run", "chat", "plan", "profile", "bench", "report", "models", "doctor"):
        assert f"## pshard {name}\n" in text
    for flag in ("--vram", "--explain", "--baseline", "--temp", "--quick", "--shared-prefix"):
        assert flag in text


def test_the_reference_of_python_has_signatures_and_errors() -> None:
    text = SITE["describe_python"]()
    assert "## load" in text and "**Raises**" in text and "### Engine.generate" in text
    assert "## fetch_model\n" in text and "too little disk" in text


def test_links_of_pages_lead_to_their_places_on_the_site() -> None:
    page = type("Page", (), {"file": type("File", (), {"src_uri": "hub.md"})})
    turned = SITE["on_page_markdown"]("[a](planning.md#x) [b](../registries/FORMAT.md) [c](../models/stored.py)", page)
    assert turned == "[a](planning.md#x) [b](registry-format.md) c"


def test_lists_and_tables_right_below_a_paragraph_are_lists_and_tables_on_the_site() -> None:
    table, code = "| a | b |\n|---|---|\n", "Code:\n```\ntext\n- no item\n  - nor this\n```\n# A title\n- an item\n"
    page = f"Two ways:\n- one\n  - nested\n- two\n\nThen:\n1. first\n2. second\n\nAll:\n{table}"
    parted = f"Two ways:\n\n- one\n    - nested\n- two\n\nThen:\n\n1. first\n2. second\n\nAll:\n\n{table}"
    assert SITE["part_blocks"](page + code) == parted + code


def test_every_dependency_has_its_reason_where_it_is_used() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    lines = [row.split("|") for row in page.splitlines() if row.startswith("| ")]
    rows = {cells[1].strip(): cells for cells in lines}
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    named = " ".join(cell for cells in lines for cell in cells[1:3])
    names = [d.split(">=")[0] for extra in project["optional-dependencies"].values() for d in extra]
    assert not [name for name in names if name not in named]
    sources = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in list_sources()}
    for dependency in (d.split(">=")[0] for d in project["dependencies"]):
        assert dependency in rows, f"{dependency} has no row"
        module = MODULES.get(dependency, dependency.replace("-", "_"))
        places = [place for place in rows[dependency][3].split("`")[1::2] if "/" in place]
        for place in places:
            used = [text for path, text in sources.items() if path.startswith(place)]
            assert any(f"import {module}" in t or f"from {module}" in t for t in used), f"{place} does not use {module}"
        assert places or "no import" in rows[dependency][2], f"{dependency}: nobody says where"
