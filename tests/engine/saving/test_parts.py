"""Nodes that share no disk: each keeps its part, neighbours have copies, a resume brings parts."""

import itertools
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.engine import train
from orchestrator.protocol.events import UNSAVED, RankSlow, event_from_report
from orchestrator.protocol.message import parse_object
from tests.engine.core.test_parity import fsdp
from tests.engine.saving.test_resume import STEPS, checkpoints, job, losses, resumed, saving
from tests.engine.worlds import NAME, Job, run

pytestmark = pytest.mark.slow

NODES = [2, 1, 1]
FOR_ALL = [".metadata", "__0_alike_0.distcp"]
UNTIL_8: list[dict[str, Any]] = [
    {"training": {"max_steps": 8}},
    {"scheduler": {"total_steps": STEPS}},
]


def spread(directory: Path, name: str, nodes: list[int], *changes: Any) -> Job:
    return job(directory, name, nodes, fsdp("full_shard"), *changes, own_disks=True)


def on_disk(job: Job, node: int, step: int = 8) -> list[str]:
    directory = job.experiment(node) / f"outputs/checkpoints/step_{step:08d}"
    return sorted(
        (p.name for p in directory.iterdir()), key=lambda name: (name not in FOR_ALL, name)
    )


def disks(of: Job, onto: Job, nodes: list[int]) -> None:
    """Copy the disks of an earlier job's nodes to the nodes of another job, in this order."""
    for node, before in enumerate(nodes):
        if before >= 0:
            place = Path("outputs/checkpoints")
            shutil.copytree(of.experiment(before) / place, onto.experiment(node) / place)


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the same training from its first step to its last."""
    whole = job(tmp_path_factory.mktemp("whole"), "whole", NODES, fsdp("full_shard"), saving())
    assert run(whole) == [[0] * 4]
    return losses(whole)


def test_nodes_keep_parts_and_resume_on_any_layout(
    tmp_path: Path, expected: dict[int, float]
) -> None:
    first = spread(tmp_path, "first", NODES, saving(), *UNTIL_8)
    assert run(first) == [[0] * 4]
    assert "each keeps its own part of every checkpoint" in first.output()
    parts = [["__0_0.distcp", "__1_0.distcp"], ["__2_0.distcp"], ["__3_0.distcp"]]
    for node, own in enumerate(parts):
        assert on_disk(first, node) == [*FOR_ALL, *own, "manifest.json"]
        assert checkpoints(first, node) == ["step_00000004", "step_00000008"]
    layouts = {
        "same": (NODES, [0, 1, 2]),
        "more nodes, fewer ranks, another order": ([1, 1, 1, 1], [1, -1, 0, 2]),
    }
    jobs = {n: spread(tmp_path, n, shape, resumed()) for n, (shape, _) in layouts.items()}
    for name, each in jobs.items():
        disks(first, each, layouts[name][1])
    codes = run(*jobs.values())
    for (name, each), ended in zip(jobs.items(), codes, strict=True):
        assert set(ended) == {0}, (name, each.output())
        assert "resuming after step 8" in each.output()
        found = losses(each)
        assert list(found) == [9, 10, 11, 12]
        same = {step: expected[step] for step in found}
        assert found == (same if name == "same" else pytest.approx(same, abs=1e-5)), name
        assert checkpoints(each)[-1] == "step_00000012"
    assert " 0 B came from other nodes" in jobs["same"].output()


def test_copy_replaces_lost_disk(tmp_path: Path, expected: dict[int, float]) -> None:
    first = spread(tmp_path, "first", NODES, saving(copies=2, keep=1), *UNTIL_8)
    assert run(first) == [[0] * 4]
    assert "which is on 2 nodes (checkpoint.copies)" in first.output()
    parts = [[0, 1, 3], [0, 1, 2], [2, 3]]
    for node, ranks in enumerate(parts):
        names = [f"__{rank}_0.distcp" for rank in ranks]
        assert on_disk(first, node) == [*FOR_ALL, *names, "manifest.json"]
        assert checkpoints(first, node) == ["step_00000008"]
    again = spread(tmp_path, "again", NODES, resumed(copies=2))
    disks(first, again, [-1, 1, 2])
    assert run(again) == [[0] * 4], again.output()
    assert "resuming after step 8" in again.output()
    assert losses(again) == {step: expected[step] for step in range(9, STEPS + 1)}


def test_missing_part_is_named_and_older_checkpoint_taken(tmp_path: Path) -> None:
    first = spread(tmp_path, "first", [1, 1], saving(), *UNTIL_8)
    assert run(first) == [[0] * 2]
    again = spread(tmp_path, "again", [1, 1], resumed())
    disks(first, again, [0, 1])
    places = again.experiment(1) / "outputs/checkpoints"
    (places / "step_00000008/__1_0.distcp").unlink()
    assert run(again) == [[0] * 2], again.output()
    assert "WARNING: step 8 lacks __1_0.distcp (written by " in again.output()
    assert "resuming after step 4" in again.output()
    lost = spread(tmp_path, "lost", [1, 1], resumed())
    disks(first, lost, [0, -1])
    assert run(lost) == [[1] * 2]
    assert "no checkpoint is whole on the nodes of this job" in lost.output()
    assert "step 4 lacks __1_0.distcp" in lost.output()
    assert "checkpoint.resume=never starts from the beginning" in lost.output()
    assert not list((lost.path / "node1" / NAME / "outputs").glob("checkpoints/.step*"))


def test_checkpoint_counts_without_room_for_copy(tmp_path: Path, small_disk: Path) -> None:
    """The checkpoint counts all the same, and a resume says which part only one disk had."""
    first = spread(tmp_path, "first", [1, 1], saving(), *UNTIL_8)
    assert run(first) == [[0, 0]]
    place = Path("outputs/checkpoints")
    own = sum(path.stat().st_size for path in (first.experiment(1) / place).glob("*4/*"))
    tight = spread(tmp_path, "tight", [1, 1], saving(copies=2), *UNTIL_8[1:])
    tight.config["training"]["max_steps"] = 4
    (tight.experiment(1) / place).parent.mkdir(parents=True)
    (tight.experiment(1) / place).symlink_to(small_disk)
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    (small_disk / "filler").write_bytes(bytes(free - own * 3 // 2))
    assert run(tight) == [[0, 0]]
    line = "WARNING: step 4 is saved, but not all of its copies: __0_0.distcp on "
    assert line in tight.output() and "No space left on device" in tight.output()
    assert on_disk(tight, 0, 4) == [*FOR_ALL, "__0_0.distcp", "__1_0.distcp", "manifest.json"]
    assert set(on_disk(tight, 1, 4)) == {".metadata", "__1_0.distcp", "manifest.json"}
    for kept, code in ((0, 0), (1, 1)):
        again = spread(tmp_path, f"again{kept}", [1, 1], resumed())
        disks(tight, again, [kept, -1])
        assert run(again) == [[code] * 2], again.output()
        said = "resuming after step 4" if kept == 0 else "step 4 lacks __0_"
        assert said in again.output()


@pytest.mark.parametrize("strategy", ["full_shard", "ddp"])
def test_node_without_room_is_reported_at_once_and_at_end(
    tmp_path: Path, small_disk: Path, strategy: str
) -> None:
    """With what its disk has, and what a restart goes on from; the head hears of it once."""
    apart, memory = strategy == "full_shard", str(tmp_path / "memory")
    tight = job(tmp_path, "tight", [1, 1], fsdp(strategy), saving(2), own_disks=True, memory=memory)
    tight.config["training"]["max_steps"] = 6
    tight.config["checkpoint"]["memory_every"] = 1
    (place := tight.experiment(1) / "outputs/checkpoints").parent.mkdir(parents=True)
    place.symlink_to(small_disk)
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 8192))
    (tight.path / "reports").touch()
    assert run(tight) == [[1, 1] if apart else [0, 0]], tight.output(1)
    why = f"rank 1 on node 1 ({os.uname().nodename}): No space left on device ({place})"
    first, second = (tight.output(rank) for rank in (0, 1))
    said, silent = (first, second) if apart else (second, first)
    assert "NOT SAVED" not in silent
    line = next(line for line in said.splitlines() if f"NOT SAVED: step 4: {why}" in line)
    assert "; nothing of this run is on the disk; training continues" in line
    if apart:
        last = "the last checkpoint, of step 6, could not be saved"
        assert f"{last}: {why}" in second
        assert f"ended because of another rank: {last} by rank 1" in first
    else:
        # The other node has all of it.
        assert on_disk(tight, 0, 6) == [".metadata", "__0_0.distcp", "manifest.json"]
    event = event_from_report(parse_object((tight.path / "reports").read_bytes().splitlines()[0]))
    assert isinstance(event, RankSlow) and why in event.text
    assert (event.cause, event.who, event.node, event.step) == (UNSAVED, 1, 1, 2)


def dies(_: Path) -> None:
    """Train, and kill this node before the n-th time that a file of step 8 gets its name."""
    node, last = os.environ["DIES"].split(":")
    count = itertools.count(1)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        ours = event == "os.rename" and "step_00000008" in str(arguments[0])
        if ours and next(count) == int(last):
            os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["GROUP_RANK"] == node:
        sys.addaudithook(watch)
    train.main()


# Of each node: .metadata, the manifest, the name of all; then its copies of the other's files.
PUBLISHED = 3
MOMENTS = ["0:2", "0:3", "0:4", "1:3"]


@pytest.fixture(scope="session")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    whole = spread(tmp_path_factory.mktemp("two"), "whole", [1, 1], saving(copies=2))
    assert run(whole) == [[0, 0]], whole.output()
    return losses(whole)


@pytest.mark.parametrize("moment", MOMENTS)
def test_death_during_publish_leaves_whole_checkpoint(
    tmp_path: Path, moment: str, of_two: dict[int, float]
) -> None:
    first = spread(tmp_path, "first", [1, 1], saving(copies=2))
    first.call, first.env = "tests.engine.saving.test_parts:dies", {"DIES": moment}
    again = spread(tmp_path, "again", [1, 1], resumed(copies=2))
    (ended,) = run(first)
    node, last = map(int, moment.split(":"))
    assert ended[node] == -signal.SIGKILL
    disks(first, again, [0, 1])
    assert run(again) == [[0, 0]], again.output()
    is_whole = last > PUBLISHED
    assert f"resuming after step {8 if is_whole else 4}" in again.output()
    found = losses(again)
    assert found == {step: of_two[step] for step in found}
    assert checkpoints(again)[-1] == "step_00000012"
    for each in (0, 1):
        assert not list((again.experiment(each) / "outputs/checkpoints").glob(".step*"))
