"""An image for the containers: torch, this package, and the directory it is built in."""

from __future__ import annotations

import shlex
from pathlib import Path

from orchestrator.common.errors import EXIT_DONE, UsageError
from orchestrator.head.screen.output import tell

BASE = "pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime"
CLONE = Path(__file__).parents[3]
NEEDED = ("pyproject.toml", "README.md", "orchestrator")  # what pip needs of our clone

TEXT = """\
# syntax=docker/dockerfile:1
#   docker build --build-context orchestrator={clone} -t train .
# Everything here goes into the image: put .git, .venv and experiments into .dockerignore.
FROM {base}

COPY --from=orchestrator {files} /opt/orchestrator/
COPY --from=orchestrator {package} /opt/orchestrator/{package}
RUN pip install --no-cache-dir /opt/orchestrator

WORKDIR /workspace
COPY . .
"""


def generate(base: str) -> int:
    tell(text(base))
    return EXIT_DONE


def text(base: str) -> str:
    if any(character.isspace() for character in base) or not base:
        raise UsageError(f"--base {base!r} cannot name an image")
    for name in NEEDED:
        if not (CLONE / name).exists():
            raise UsageError(
                f"there is no {name} in {CLONE}: this is an installed copy, not a clone",
                "run it from a clone that was installed with pip install -e .",
            )
    *files, package = NEEDED
    where = shlex.quote(str(CLONE))
    return TEXT.format(clone=where, base=base, files=" ".join(files), package=package)
