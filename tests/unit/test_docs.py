"""The pages point to what is there: files, headings, modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", page.read_text())):
        name, _, anchor = link.partition("#")
        if "://" in link:
            continue
        there = (page.parent / name).resolve() if name else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            wrong.append(link)
    assert not wrong


@pytest.mark.parametrize("name", ["docs/architecture.md", "docs/glossary.md", "CONTRIBUTING.md"])
def test_every_module_that_is_named_is_there(name: str) -> None:
    text = (ROOT / name).read_text()
    paths = re.findall(r"`([\w-]+/[\w/-]+\.py)`", text)
    assert name != "docs/architecture.md" or len(paths) > 20
    places = (ROOT, ROOT / "src" / "onceflow")
    assert not [path for path in paths if not any((at / path).exists() for at in places)]


def test_architecture_has_every_room() -> None:
    rooms = {path.parent.name for path in (ROOT / "src" / "onceflow").glob("*/__init__.py")}
    picture = (ROOT / "docs" / "architecture.md").read_text().split("```")[1]
    assert rooms - set(re.findall(r"\w+", picture)) == set()
