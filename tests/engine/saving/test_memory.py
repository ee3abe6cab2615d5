"""States in memory: killed, torn, flipped, moved; the run goes on as if nothing had happened."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.core.test_parity import config, fsdp
from tests.engine.worlds import CONFIGURED, Job, run

pytestmark = pytest.mark.slow

STEPS = 12
SHARDED = fsdp("full_shard")
TWO_NODES = [1, 1]


def job(path: Path, name: str, nodes: list[int], *changes: dict[str, Any], **more: Any) -> Job:
    ends = {"training": {"max_steps": STEPS}, "checkpoint": {"at_end": False, "memory_every": 1}}
    own = {"memory": str(path / "memory"), **more}
    return Job(str(path / name), nodes, config(ends, *changes, world=sum(nodes)), **own)


def until(steps: int) -> dict[str, Any]:
    return {"training": {"max_steps": steps}, "scheduler": {"total_steps": STEPS}}


def on_disk(path: Path, every: int = 4) -> dict[str, Any]:
    """With a restart in mind: what this job itself has saved there."""
    return {"checkpoint": {"steps": every, "directory": str(path / "disk")}}


def losses(job: Job, rank: int = 0) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in job.metrics(rank) if "loss" in line}


def after(step: int, job: Job) -> dict[int, float]:
    return {number: loss for number, loss in losses(job).items() if number > step}


@pytest.mark.parametrize("strategy", ["hybrid_shard", "full_shard", "ddp"])
def test_it_goes_on_from_memory_to_the_bit(tmp_path: Path, strategy: str) -> None:
    """Also after a node was replaced: its memory is empty, the next node has what it had."""
    whole = job(tmp_path, "whole", [2, 2], fsdp(strategy), memory="")
    first = job(tmp_path, "first", [2, 2], fsdp(strategy), until(7))
    assert run(whole, first) == [[0] * 4] * 2, first.output()
    sent = "with a copy of the node before it" in first.output()
    # Otherwise each node has all shards by itself.
    assert sent == (strategy == "full_shard")
    shutil.rmtree(first.memory_of(0))
    again = job(tmp_path, "again", [2, 2], fsdp(strategy))
    assert run(again) == [[0] * 4], again.output()
    assert f"resuming after step 7, from memory ({first.memory_of(0)}): " in again.output()
    assert "came from other nodes" in again.output()
    # Torch orders ddp's buckets differently after a restart.
    exact = {} if strategy != "ddp" else {"abs": 1e-6}
    assert losses(again) == (pytest.approx(after(7, whole), **exact) if exact else after(7, whole))
    assert again.metrics()[-1]["tokens"] == whole.metrics()[-1]["tokens"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def files(memory: Path, rank: int, step: int) -> list[Path]:
    """All that hold what a rank wrote of this step: of the first node, then of the second."""
    return sorted(memory.glob(f"node*/trainer1/step_{step:08d}/__{rank}_0.distcp"))


def own_one(memory: Path) -> None:
    flip(files(memory, 0, 7)[0])


def torn(memory: Path) -> None:
    """A state that was being written when its ranks were killed."""
    for path in memory.glob("node*/trainer1/step_00000007"):
        (path / "manifest.json").unlink()
        path.rename(path.parent / ".step_00000007.abcd.partial")


def all_of_a_shard(memory: Path) -> None:
    for path in memory.glob("node*/trainer1/step_*/__1_0.distcp"):
        path.unlink()


HARM: dict[str, tuple[Callable[[Path], None], int, list[str]]] = {
    "nothing": (lambda memory: None, 7, ["from memory"]),
    "a flipped byte": (own_one, 6, ["WARNING: step 7 in memory cannot be trusted: __0_0.distcp is"
                                    " damaged: its sha256 is not the manifest's (",
                                    "from memory"]),
    "half of a state": (torn, 6, ["from memory"]),
    "a shard is nowhere": (all_of_a_shard, 4, ["step 7 lacks __1_0.distcp (written by ",
                                               "step 6 lacks ", "step_00000004"]),
}  # fmt: skip


def test_the_newest_state_that_is_whole_is_taken(tmp_path: Path) -> None:
    whole = job(tmp_path, "whole", TWO_NODES, SHARDED, memory="")
    first = job(tmp_path, "first", TWO_NODES, SHARDED, until(7), on_disk(tmp_path))
    assert run(whole, first) == [[0, 0]] * 2, first.output()
    restart = {"ORCHESTRATOR_ATTEMPT": "2"}
    jobs = []
    for name, (harm, _, _) in HARM.items():
        memory = tmp_path / f"memory of {name}"
        shutil.copytree(tmp_path / "memory", memory)
        harm(memory)
        jobs.append(job(tmp_path, name, TWO_NODES, SHARDED, on_disk(tmp_path, 100),
                        memory=str(memory), env=restart))  # fmt: skip
    codes = run(*jobs)
    for (name, (_, step, words)), again, ended in zip(HARM.items(), jobs, codes, strict=True):
        assert ended == [0, 0], again.output()
        for said in (f"resuming after step {step}, from ", *words):
            assert said in again.output(), f"{name}: {again.output()}"
        assert losses(again) == after(step, whole), name


def test_what_is_not_this_programs_is_passed_over(tmp_path: Path) -> None:
    """Another model's memory is reported and ignored; a later step on disk is preferred."""
    first = job(tmp_path, "first", TWO_NODES, SHARDED, until(8), on_disk(tmp_path),
                {"checkpoint": {"memory_every": 5}})  # fmt: skip
    other = job(tmp_path, "other", TWO_NODES, SHARDED, {"model": {"args": {"dim": 4}}}, until(1))
    later = job(tmp_path, "later", TWO_NODES, SHARDED, on_disk(tmp_path, 100))
    assert run(first) == [[0, 0]]
    assert run(later, other) == [[0, 0]] * 2, other.output()
    assert "what is in memory is skipped: it is of another program or model" in other.output()
    assert "resuming" not in other.output()
    assert f"resuming after step 8, from {tmp_path / 'disk/step_00000008'}" in later.output()


# By name: the nodes and their strategy, the nodes whose memory is lost, those and the strategy
# after it, and the harm to what is left.
OTHER_LAYOUTS: dict[str, tuple[list[int], str, list[int], list[int], str, str]] = {
    "a node is lost": ([1, 1, 1], "full_shard", [1], [1, 1], "full_shard", "nothing"),
    "nodes join": ([1, 1], "full_shard", [], [2, 2], "full_shard", "nothing"),
    "another strategy": ([2, 1], "full_shard", [1], [2], "ddp", "nothing"),
    "each rank has buffers": ([1, 1, 1], "ddp", [0], [1, 1], "ddp", "nothing"),
    "wider groups": ([1, 1], "hybrid_shard", [0], [2], "hybrid_shard", "nothing"),
    "a file is damaged": ([1, 1, 1], "full_shard", [2], [1, 1], "full_shard", "a flipped byte"),
}


@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_other_ranks_put_the_state_together_from_memory(tmp_path: Path, name: str) -> None:
    nodes, strategy, lost, after_it, other, damage = OTHER_LAYOUTS[name]
    harm, step, _ = HARM[damage]
    buffers = {"model": {"target": f"{CONFIGURED}:with_buffers"}} if "buffers" in name else {}
    whole = job(tmp_path, "whole", nodes, fsdp(strategy), buffers, memory="")
    first = job(tmp_path, "first", nodes, fsdp(strategy), buffers, until(7))
    assert run(whole, first) == [[0] * sum(nodes)] * 2, first.output()
    for node in lost:
        shutil.rmtree(first.memory_of(node))
    left = [node for node in range(len(nodes)) if node not in lost]
    for place, node in enumerate(left):
        first.memory_of(node).rename(tmp_path / "memory" / f"node{place}")
    harm(tmp_path / "memory")
    again = job(tmp_path, "again", after_it, fsdp(other), buffers)
    assert run(again) == [[0] * sum(after_it)], again.output()
    assert f"resuming after step {step}, from memory" in again.output()
    assert losses(again) == pytest.approx(after(step, whole), abs=1e-5)
    assert again.metrics()[-1]["tokens"] == whole.metrics()[-1]["tokens"]


def test_where_memory_is_short_it_is_refused_in_words(tmp_path: Path, small_disk: Path) -> None:
    """Memory that other users may write to is also refused; the training goes on without."""
    large = {"model": {"args": {"dim": 2000}}, "checkpoint": {"memory_every": 1}}
    tight = job(tmp_path, "tight", [1], large, until(2), memory=str(small_disk))
    open_to_all = job(tmp_path, "open", [1], until(2), memory=str(tmp_path / "open memory"))
    open_to_all.memory_of(0).mkdir(parents=True)
    open_to_all.memory_of(0).chmod(0o777)
    assert run(tight, open_to_all) == [[0], [0]]
    assert "WARNING: no state is kept in memory from now on: two states of this node's ranks" in (
        tight.output()
    )
    assert "may be written by everybody (rank 0); a restart goes on from" in open_to_all.output()
    assert not list(open_to_all.memory_of(0).iterdir())


def test_the_last_state_of_a_training_that_is_stopped_is_kept(tmp_path: Path) -> None:
    """Else a job that is ended to go on with more nodes would lose what came after the last."""
    endless = {"training": {"max_steps": 10**6}, "scheduler": {"total_steps": STEPS}}
    rarely = {"checkpoint": {"memory_every": 1000}}
    first = job(tmp_path, "first", TWO_NODES, endless, rarely, signal=signal.SIGTERM)
    assert run(first) == [[0, 0]]
    last = first.metrics()[-1]["step"]
    again = job(tmp_path, "again", TWO_NODES, until(last + 1), rarely)
    assert run(again) == [[0, 0]], again.output()
    assert f"resuming after step {last}, from memory" in again.output()


def test_states_are_kept_by_the_clock_of_rank_0_unless_the_config_says_how_often(
    tmp_path: Path,
) -> None:
    by_clock = {"checkpoint": {"memory_every": None}}
    first = job(tmp_path, "first", [2], SHARDED, until(3), by_clock)
    assert run(first) == [[0, 0]]
    assert "checkpoint in memory for at most 3% of the time" in first.output()
    again = job(tmp_path, "again", [2], SHARDED, until(4), by_clock)
    assert run(again) == [[0, 0]]
    assert ", from memory" in again.output()
