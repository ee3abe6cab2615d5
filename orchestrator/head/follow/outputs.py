"""Brings home what ranks wrote on nodes that do not share the head's disk. Called by follow.py."""

from __future__ import annotations

import base64
from pathlib import Path, PurePosixPath
from typing import Any

from orchestrator import files
from orchestrator.head.connect.channel import Link

ANSWER_SECONDS = 20.0
RESULTS = "results/"  # of Cluster.run: somebody waits for them, of whatever size
LARGEST = 64 << 20  # bytes of one file; what is larger stays where it is, and is named


def bring(link: Link, job: str, node: int, outputs: Path) -> str:
    """Every file that is not here yet; what had to stay there, in words."""
    found = link.ask("outputs", ANSWER_SECONDS, job=job, node=node)
    stays = []
    for one in found["files"]:
        if not plain(one["path"]):
            continue  # no node of ours would name such a path
        if one["size"] > LARGEST and not one["path"].startswith(RESULTS):
            stays.append(f"{one['path']} ({one['size'] / 1e6:,.0f} MB)")
        elif not (outputs / one["path"]).exists():
            fetch(link, {"job": job, "node": node, **one}, outputs / one["path"])
    if found["checkpoints"]:
        stays.append("its checkpoints")
    return f"{', '.join(stays)} stay on the node, in {found['place']}" if stays else ""


def plain(path: str) -> bool:
    """Below the outputs, whatever a node may say."""
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and not {"..", "."} & set(parts)


def fetch(link: Link, file: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as kept:
        while kept.tell() < file["size"]:
            words = {"job": file["job"], "node": file["node"], "path": file["path"]}
            answer = link.ask("output", ANSWER_SECONDS, offset=kept.tell(), **words)
            data = base64.b64decode(answer["data"])
            if not data:
                break  # it became shorter meanwhile
            kept.write(data)
