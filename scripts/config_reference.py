#!/usr/bin/env python3
"""Write docs/config.md from the fields of the classes in orchestrator/config/schema.py.

scripts/config_reference.py [--check]
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
import sys
import typing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from orchestrator.config import schema  # noqa: E402

PAGE = ROOT / "docs/config.md"
SOURCE = ROOT / "orchestrator/config/schema.py"
HEAD = """# Every key of a config file

Made by `scripts/config_reference.py` from the classes that read it. A file has some of these
sections; what is left out has its default. Later ones win: the file, the environment
(`ORCHESTRATOR_TRAINING_MAX_STEPS=5`), `--set training.max_steps=5`, an option of the same name.
An unknown key, or a value that contradicts another, is an error before anything starts.
"""


def comments() -> dict[tuple[str, str], str]:
    """(class, field) -> what stands behind the field in the source."""
    lines = SOURCE.read_text(encoding="utf-8").splitlines()
    found = {}
    for node in ast.parse("\n".join(lines)).body:
        for item in node.body if isinstance(node, ast.ClassDef) else []:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                text = lines[(item.end_lineno or item.lineno) - 1][item.end_col_offset or 0 :]
                _, _, words = text.partition("#")
                found[node.name, item.target.id] = words.strip()
    return found


def section(name: str, kind: Any, words: dict[tuple[str, str], str]) -> str:
    lines = [f"## {name}", "", f"{kind.__doc__}".replace("\n    ", "\n").strip(), ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        meaning = words[kind.__name__, item.name]
        if "only" in item.metadata:
            other, values = item.metadata["only"]
            wanted = ", ".join(str(value).lower() for value in values)
            meaning = f"{meaning}{'; ' if meaning else ''}for {other}: {wanted}"
        if "rest" in item.metadata:
            meaning = f"any variable of the ranks, in capitals, {meaning}; wins over computed ones"
        made = item.default_factory
        default = item.default if made is dataclasses.MISSING else made()
        shown_name = "NAME" if "rest" in item.metadata else item.name
        lines.append(
            f"| `{shown_name}` | {type_of(hints[item.name])} | {shown(default)} | {meaning} |"
        )
    return "\n".join(lines)


def type_of(hint: Any) -> str:
    if typing.get_origin(hint) is dict:
        return "text" if typing.get_args(hint)[1] is str else "keys and values"
    text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    text = re.sub(r"typing\.|, \.\.\.", "", text).replace("tuple", "list")
    return re.sub(r" \| None", "", text).replace("str", "text").replace("|", "or")


def shown(value: Any) -> str:
    if value is None or value in ((), {}):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{list(value)}" if isinstance(value, tuple) else f"{value}"


def page() -> str:
    words = comments()
    hints = typing.get_type_hints(schema.Config)
    parts = [HEAD]
    for item in dataclasses.fields(schema.Config):
        kind = hints[item.name]
        if dataclasses.is_dataclass(kind):
            parts.append(section(item.name, kind, words))
        else:
            meaning = words["Config", item.name]
            parts.append(
                f"## {item.name}\n\n{meaning[:1].upper()}{meaning[1:]}: `NAME: value` pairs."
            )
    return "\n".join(parts).replace("\n## ", "\n\n## ").replace("\n\n\n", "\n\n") + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/config.md.")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    if parser.parse_args().check:
        if PAGE.read_text(encoding="utf-8") != page():
            sys.exit("docs/config.md is out of date; type: scripts/config_reference.py")
        return
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
