"""The templates of pages and pictures. What is put into them is escaped: nobody has checked it."""

from __future__ import annotations

from pathlib import Path

import jinja2


def templates_in(folder: Path) -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
