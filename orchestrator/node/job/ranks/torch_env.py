"""Reads in a program's text what it does with torch: variables set too late, and training.

A rank forked from torchrun has imported torch already. If the program's own file sets a variable
that torch reads then before it imports torch, the rank starts afresh. A program that trains makes
torch import as much again: torchrun does that for all ranks. Each answer that is wrong on the safe
side costs time alone.
Imports nothing of ours: rank.py loads it by its path, into the process of the user's program.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

# A name in quotes, or a keyword of update(), that is given a value; where the value is a plain
# string, it is the second group.
SETTING = re.compile(
    r"(?:(?<!get\()(?<!getenv\()[\"']|\bupdate\()"
    r"((?:OMP|GOMP|KMP|MKL|OPENBLAS|NUMEXPR|DNNL|ONEDNN|ATEN|PYTORCH|TORCH)\w+)"
    r"(?:[\"']\s*(?:\]\s*=(?!=)|[,:)])|\s*=(?!=))(?:\s*[\"']([^\"'\n]*)[\"'](?=\s*[\n,;)}#]|$))?"
)
READ_LATER = re.compile(
    r"(PYTORCH_(\w+_)?ALLOC_CONF|TORCH_(NCCL|FR)_\w+|TORCHELASTIC_\w+|TORCHINDUCTOR_CACHE_DIR)$"
)
IMPORTS_TORCH = re.compile(r"^[ \t]*(?:import[ \t][\w., \t]*\b|from[ \t]+)torch\b", re.MULTILINE)
# An optimizer imports this when it is made: without it, 1.7 s in each rank.
OF_OPTIMIZERS = "torch._dynamo"
TRAINS = re.compile(
    r"\boptim|Trainer\b|\bbackward\(|\b(lightning|accelerate|deepspeed|fully_shard)\b"
)
MOST_FILES = 50
MOST_LETTERS = 1 << 20


def set_early(path: str, environ: Mapping[str, str]) -> str:
    """Return a variable that the program in this file sets before it imports torch, or nothing."""
    return changed(IMPORTS_TORCH.split(text_of(path), maxsplit=1)[0], environ)


def will_train(target: Mapping[str, Any], workdir: str, environ: Mapping[str, str]) -> bool:
    """Return True if the program trains, and sets nothing that an optimizer's import reads.

    A program is known by its own file and those beside it, an installed module by its name.
    """
    if target["kind"] not in ("script", "module", "engine"):
        return False
    path = file_of(target, workdir)
    here = os.path.isfile(path)
    texts = list(texts_in(os.path.dirname(path) if here else workdir, os.path.basename(path)))
    named = target["kind"] != "script" and not here and "train" in target["name"]
    trains = named or any(map(TRAINS.search, texts))
    return trains and not any(changed(text, environ) for text in texts)


def changed(text: str, environ: Mapping[str, str]) -> str:
    """Return a variable that torch reads when it is imported and this text sets, or nothing."""
    if "environ" in text or "putenv" in text:
        for name, value in SETTING.findall(text):
            if environ.get(name) != value and not READ_LATER.match(name):
                return str(name)
    return ""


def file_of(target: Mapping[str, Any], workdir: str) -> str:
    """Return the file that Python would run; one that is not there is some installed module's."""
    path = os.path.join(workdir, target["name"])
    if target["kind"] != "script":
        path = os.path.join(workdir, *target["name"].split("."))
        path = path if os.path.isdir(path) else path + ".py"
    return os.path.join(path, "__main__.py") if os.path.isdir(path) else path


def texts_in(directory: str, first: str) -> Iterator[str]:
    """Yield the texts of a directory's Python files, this one first."""
    with contextlib.suppress(OSError):
        names = sorted(name for name in os.listdir(directory) if name.endswith(".py"))
        for name in list(dict.fromkeys([first, *names]))[:MOST_FILES]:
            yield text_of(os.path.join(directory, name))


def text_of(path: str) -> str:
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read(MOST_LETTERS)
    return ""
