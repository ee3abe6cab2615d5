"""Text for standard output."""

from __future__ import annotations

import io
import sys

import click


def tell(text: str) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that Latin-1 cannot show
    click.echo(text)
