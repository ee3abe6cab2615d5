"""The pages that describe the code are held to it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DESIGN = (ROOT / "docs/design.md").read_text(encoding="utf-8")


def table(title: str) -> list[list[str]]:
    """The rows of the table under a heading, without its two head lines."""
    section = DESIGN.partition(f"## {title}")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_the_table_where_to_change_names_what_is_there() -> None:
    rows = table("Where do I change ...")
    paths = [path for row in rows for cell in row for path in re.findall(r"`([\w/.]+)`", cell)]
    paths = [path for path in paths if "/" in path]
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_room_can_be_found_from_the_table() -> None:
    """A newcomer finds each folder of the package by something that is changed there."""
    text = " ".join(cell for row in table("Where do I change ...") for cell in row)
    rooms = {path.parent.relative_to(ROOT).parts[1] for path in ROOT.glob("orchestrator/*/*.py")}
    assert {room for room in rooms if f"orchestrator/{room}" not in text} <= {"local_cluster"}


def test_the_trees_on_the_pages_are_those_of_the_package() -> None:
    command = [sys.executable, str(ROOT / "scripts/house_tree.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_links_between_pages_lead_somewhere() -> None:
    wrong = []
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/*.md")]:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)", text):
            if not (page.parent / link).exists():
                wrong.append(f"{page.relative_to(ROOT)}: {link}")
    assert wrong == []
