#!/usr/bin/env python3
"""Write the tree of rooms into docs/decisions/house.md, from each folder's own docstring.

scripts/house_tree.py [--check]
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOUSE = ROOT / "orchestrator"
# The levels of folders that are shown on each page.
PAGES = {"docs/decisions/house.md": 2}
BEGIN, END = "<!-- tree: scripts/house_tree.py -->", "<!-- end of the tree -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="Change nothing; exit 1 if stale.")
    check = parser.parse_args().check
    stale = []
    for name, levels in PAGES.items():
        page = ROOT / name
        text = page.read_text(encoding="utf-8")
        fresh = with_tree(text, levels)
        if fresh != text:
            stale.append(name)
            if not check:
                page.write_text(fresh, encoding="utf-8")
    if check and stale:
        print(f"{', '.join(stale)}: out of date; type: scripts/house_tree.py", file=sys.stderr)
    return int(check and bool(stale))


def with_tree(text: str, levels: int) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or not after:
        raise SystemExit(f"no {BEGIN} ... {END} in the page")
    return f"{before}{BEGIN}\n```\n{tree(levels)}\n```\n{END}{after}"


def tree(levels: int) -> str:
    rows = [("orchestrator/", "")]
    rows += rows_of(HOUSE, levels, "    ")
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{what}".rstrip() for name, what in rows)


def rows_of(folder: Path, levels: int, indent: str) -> list[tuple[str, str]]:
    rows = []
    for room in sorted(path.parent for path in folder.glob("*/__init__.py")):
        rows.append((f"{indent}{room.name}/", purpose(room)))
        if levels > 1:
            rows += rows_of(room, levels - 1, indent + "    ")
    return rows


def purpose(room: Path) -> str:
    """Return the first line of the docstring of a folder's __init__.py."""
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8")))
    if not text:
        raise SystemExit(f"{room.relative_to(ROOT)}/__init__.py has no docstring to show")
    return text.splitlines()[0].removesuffix(".")


if __name__ == "__main__":
    raise SystemExit(main())
