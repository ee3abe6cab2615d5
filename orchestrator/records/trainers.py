"""Finds what the Trainers of a job's program measure: a file for each of them and each rank.

Most programs have one Trainer (or engine): rank_00_metrics.jsonl, rank_01_metrics.jsonl, ...
The second one's files are rank_00_metrics_2.jsonl, ... and so on. Of a program that has none of
them, the head writes files of the same form from what its ranks print, in a directory beside it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

FILE = re.compile(r"rank_([0-9]{2,9})_metrics(?:_([0-9]{1,4}))?\.jsonl")
AT_ONCE = 60.0  # seconds: Trainers whose last lines lie no further apart take turns
MOST_AT_ONCE = 8

Files = dict[int, Path]  # rank -> its file


def file_name(rank: int, trainer: int = 1) -> str:
    """Return the name of the file in which a rank writes what a Trainer measures."""
    return f"rank_{rank:02d}_metrics{f'_{trainer}' if trainer > 1 else ''}.jsonl"


def parsed(name: str) -> tuple[int, int] | None:
    """Return the Trainer and the rank that a file's name tells; None for another file."""
    match = FILE.fullmatch(name)
    if match is None:
        return None
    trainer, rank = int(match[2] or 1), int(match[1])
    return (trainer, rank) if name == file_name(rank, trainer) else None


def printed(outputs: Path) -> Path:
    """Return the directory of what is read from the lines that ranks print."""
    return outputs.parent / "printed"


def every(outputs: Path) -> dict[int, Files]:
    """Find the files of all Trainers, or those made of what the ranks of a program print."""
    return own(outputs) or own(printed(outputs))


def own(outputs: Path) -> dict[int, Files]:
    """Find the files of all Trainers, the first Trainer's first; a link is none."""
    found: dict[int, Files] = {}
    try:
        with os.scandir(outputs) as entries:
            for entry in entries:
                known = parsed(entry.name)
                if known is not None and entry.is_file(follow_symlinks=False):
                    found.setdefault(known[0], {})[known[1]] = Path(entry.path)
    except OSError:
        return {}
    return {trainer: dict(sorted(found[trainer].items())) for trainer in sorted(found)}


def at_work(outputs: Path) -> dict[int, Files]:
    """Return the Trainers that wrote last: one, or those that take turns (a GAN's two).

    A Trainer that was made and has written nothing is none of them. Of a job that is over they are
    those that were at work at its end.
    """
    found = every(outputs)
    if len(found) < 2:
        return found
    wrote = {trainer: written(files) for trainer, files in found.items()}
    last = max(wrote.values())
    chosen = [trainer for trainer, when in wrote.items() if when and last - when <= AT_ONCE]
    return {trainer: found[trainer] for trainer in chosen[-MOST_AT_ONCE:]}


def newest(outputs: Path) -> tuple[int, Files]:
    """Return the Trainer that a screen with room for one shows: the last that was made of those
    at work, so that two that take turns do not change places."""
    return max(at_work(outputs).items(), default=(1, {}))


def written(files: Files) -> float:
    """Return when one of the files was written last; 0.0 if nothing is in them."""
    last = 0.0
    for path in files.values():
        try:
            status = path.lstat()
        except OSError:
            continue
        if status.st_size:
            last = max(last, status.st_mtime)
    return last
