"""Who carries which file to whom, and how many at once."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from orchestrator import distributed
from orchestrator.engine.saving import carry
from orchestrator.engine.saving.nodes import errands_of
from orchestrator.records.checkpoint_manifest import FileRecord
from tests.engine.programs.trainings import message
from tests.engine.worlds import Job, run
from tests.node.running import wait_until

pytestmark = pytest.mark.slow

FILE = FileRecord(1, "0" * 64)
NODES = [(0, "a"), (0, "a"), (1, "b"), (2, "c")]


def sent(names: list[str], copies: int) -> list[str]:
    errands = errands_of(dict.fromkeys(names, FILE), NODES, copies)
    return [f"{each.name} {each.source}>{each.target}" for each in errands]


def test_each_part_goes_to_the_next_node_and_what_is_alike_to_all() -> None:
    names = [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "__3_0.distcp"]
    assert sent(names, 1) == []
    ring = ["__0_0.distcp 0>2", "__1_0.distcp 1>2", "__2_0.distcp 2>3", "__3_0.distcp 3>0"]
    assert sent(names, 2) == ring
    assert len(sent(names, 3)) == len(sent(names, 9)) == 8  # no node keeps a file twice
    assert sent(["__0_alike_0.distcp"], 1) == ["__0_alike_0.distcp 0>2", "__0_alike_0.distcp 0>3"]


# -- a script that saves on rank 0 alone ----------------------------------------------------------


def all_of(path: Path) -> list[Path]:
    return [file for file in sorted(path.rglob("*")) if file.is_file()]


def saves_on_rank_0(directory: Path) -> None:
    """Three nodes, of which the last sees the disk of the first."""
    rank, node = int(os.environ["RANK"]), int(os.environ["GROUP_RANK"])
    place = directory / f"node{node % 2}"
    path = place / "a checkpoint"
    if rank == 0:
        (path / "inner").mkdir(parents=True)
        (path / "weights").write_bytes(random.Random(1).randbytes(3 * carry.PIECE_BYTES + 5))
        (path / "inner/empty").touch()
        (path / "kept").write_text("new")
    elif node == 1 and os.environ["LOCAL_RANK"] == "0":
        path.mkdir(parents=True)
        (path / "kept").write_text("old")
        (path / "own").write_text("own")
    said = [
        distributed.copy_to_nodes(path),
        distributed.copy_to_nodes(path),
        saved_by_rank_3(directory, str(place / "one.pt")),
        message(distributed.copy_to_nodes, place / "nothing"),
        distributed.copy_to_nodes(place / "nothing", missing_ok=True),
    ]
    files = [
        {file.relative_to(there).as_posix(): file.read_bytes().hex()[:99] for file in all_of(there)}
        for there in (directory / "node0", place)
    ]
    said.append(files[1].pop("a checkpoint/own", "") if node == 1 else "")
    said.append(files[0] == files[1])
    distributed.barrier()
    if rank == 1:
        shutil.rmtree(path)
        path.write_text("in the way")
    said.append(message(distributed.copy_to_nodes, path))
    (directory / f"said_{rank}").write_text(json.dumps(said))


def saved_by_rank_3(directory: Path, file: str) -> int:
    """Rank 3 writes to the disk of rank 0, too, and is not done when rank 0 begins to copy."""
    begun, wait = directory / "begun", carry.gather
    if os.environ["RANK"] == "3":
        wait_until(begun.exists)
        Path(file).write_text("alone")
    carry.gather = lambda what: (begun.touch(), wait(what))[1]
    try:
        return distributed.copy_to_nodes(file)
    finally:
        carry.gather = wait


def test_what_rank_0_saved_comes_to_all_nodes(tmp_path: Path) -> None:
    asked = Job(str(tmp_path), [1, 2, 1], {}, call=f"{__name__}:saves_on_rank_0")
    assert run(asked) == [[0] * 4], asked.output(1)
    first = tmp_path / "node0"
    for rank in range(4):
        said = json.loads((tmp_path / f"said_{rank}").read_text())
        came, again, one, refused, nothing, own, same, failed = said
        assert (came, again, one, nothing, same) == (3, 0, 1, 0, True)
        assert own == (b"own".hex() if rank in (1, 2) else "")
        assert refused.startswith("UsageError: rank 0 has no file at ") and "/nothing" in refused
        assert "has not come to the node of rank 1: " in failed and "Not a directory" in failed
    assert (first / "a checkpoint/kept").read_text() == "new"
