"""States in memory: killed, torn, flipped, moved; the run goes on as if nothing had happened."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.core.test_parity import config, fsdp
from tests.engine.worlds import CONFIGURED, Job, run

pytestmark = pytest.mark.slow

# The first ranks end after this step; they have saved on disk after the third.
STEPS, ENDED = 7, 5
SHARDED = fsdp("full_shard")
TWO_NODES = [1, 1]


def job(path: Path, name: str, nodes: list[int], *changes: dict[str, Any], **more: Any) -> Job:
    ends = {
        "training": {"max_steps": STEPS},
        "checkpoint": {"at_end": False, "memory_every": 1},
    }
    own = {"memory": str(path / "memory"), **more}
    return Job(str(path / name), nodes, config(ends, *changes, world=sum(nodes)), **own)


def until(steps: int) -> dict[str, Any]:
    return {"training": {"max_steps": steps}, "scheduler": {"total_steps": STEPS}}


def on_disk(path: Path, every: int = 3) -> dict[str, Any]:
    """With a restart in mind: what this job itself has saved there."""
    return {"checkpoint": {"steps": every, "directory": str(path / "disk")}}


def losses(job: Job, rank: int = 0) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in job.metrics(rank) if "loss" in line}


def after(step: int, job: Job) -> dict[int, float]:
    return {number: loss for number, loss in losses(job).items() if number > step}


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """The lines of the same training by one process, by their steps."""
    one = job(tmp_path_factory.mktemp("whole"), "whole", [1], memory="")
    assert run(one) == [[0]]
    return {line["step"]: line for line in one.metrics() if "loss" in line}


def goes_on(again: Job, step: int, expected: dict[int, dict[str, Any]]) -> None:
    rest = {number: line["loss"] for number, line in expected.items() if number > step}
    assert losses(again) == pytest.approx(rest, abs=1e-5)
    assert again.metrics()[-1]["tokens"] == expected[STEPS]["tokens"]


def test_resume_from_memory_is_exact(tmp_path: Path) -> None:
    """Also after a node was replaced: its memory is empty, the next node has what it had."""
    whole = job(tmp_path, "whole", [2, 2], memory="")
    first = job(tmp_path, "first", [2, 2], until(ENDED))
    assert run(whole, first) == [[0] * 4] * 2, first.output()
    assert "with a copy of the node before it" not in first.output(), "each has all shards"
    shutil.rmtree(first.memory_of(0))
    again = job(tmp_path, "again", [2, 2])
    assert run(again) == [[0] * 4], again.output()
    assert f"resuming after step {ENDED}, from memory ({first.memory_of(0)}): " in again.output()
    assert "came from other nodes" in again.output()
    assert losses(again) == after(ENDED, whole)
    assert again.metrics()[-1]["tokens"] == whole.metrics()[-1]["tokens"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def files(memory: Path, rank: int, step: int) -> list[Path]:
    """All that hold what a rank wrote of this step: of the first node, then of the second."""
    return sorted(memory.glob(f"node*/trainer1/step_{step:08d}/__{rank}_0.distcp"))


def own_one(memory: Path) -> None:
    flip(files(memory, 0, ENDED)[0])


def torn(memory: Path) -> None:
    """A state that was being written when its ranks were killed."""
    for path in memory.glob("node*/trainer1/step_00000005"):
        (path / "manifest.json").unlink()
        path.rename(path.parent / ".step_00000005.abcd.partial")


def replaced(memory: Path) -> None:
    """A node whose memory is empty: the next one has what it had."""
    shutil.rmtree(memory / "node0")


def all_of_a_shard(memory: Path) -> None:
    for path in memory.glob("node*/trainer1/step_*/__1_0.distcp"):
        path.unlink()


HARM: dict[str, tuple[Callable[[Path], None], int, list[str]]] = {
    "nothing": (lambda memory: None, ENDED, ["from memory"]),
    "a node was replaced": (replaced, ENDED, ["from memory", "came from other nodes"]),
    "a flipped byte": (own_one, ENDED - 1, ["WARNING: step 5 in memory cannot be trusted:"
                                            " __0_0.distcp is damaged: its sha256 is not the"
                                            " manifest's (", "from memory"]),
    "half of a state": (torn, ENDED - 1, ["from memory"]),
    "a shard is nowhere": (all_of_a_shard, 3, ["step 5 lacks __1_0.distcp (written by ",
                                               "step 4 lacks ",
                                               "step_00000003"]),
}  # fmt: skip


def test_newest_whole_state_is_taken(tmp_path: Path) -> None:
    whole = job(tmp_path, "whole", TWO_NODES, SHARDED, memory="")
    first = job(tmp_path, "first", TWO_NODES, SHARDED, until(ENDED), on_disk(tmp_path))
    assert run(whole, first) == [[0, 0]] * 2, first.output()
    assert "with a copy of the node before it" in first.output()
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


def test_memory_of_other_program_is_skipped(tmp_path: Path) -> None:
    """Another model's memory is reported and ignored; a later step on disk is preferred."""
    first = job(tmp_path, "first", TWO_NODES, SHARDED, until(5), on_disk(tmp_path, 5),
                {"checkpoint": {"memory_every": 3}})  # fmt: skip
    assert run(first) == [[0, 0]]
    memory = str(shutil.copytree(tmp_path / "memory", tmp_path / "memory of another"))
    other = job(tmp_path, "other", TWO_NODES, SHARDED, {"model": {"args": {"dim": 4}}}, until(1),
                memory=memory)  # fmt: skip
    later = job(tmp_path, "later", TWO_NODES, SHARDED, on_disk(tmp_path, 100))
    assert run(later, other) == [[0, 0]] * 2, other.output()
    assert "what is in memory is skipped: it is of another program or model" in other.output()
    assert "resuming" not in other.output()
    assert f"resuming after step 5, from {tmp_path / 'disk/step_00000005'}" in later.output()


# By name: the nodes of the first ranks and their strategy.
FIRST: dict[str, tuple[list[int], str]] = {
    "three": ([1, 1, 1], "full_shard"),
    "two": ([1, 1], "full_shard"),
    "uneven": ([2, 1], "full_shard"),
    "with buffers": ([1, 1, 1], "ddp"),
    "copies": ([1, 1], "hybrid_shard"),
}
# By name: the first ranks, the nodes whose memory is lost, the nodes and the strategy after it,
# and the harm to what is left.
OTHER_LAYOUTS: dict[str, tuple[str, list[int], list[int], str, str]] = {
    "a node is lost": ("three", [1], [1, 1], "full_shard", "nothing"),
    "nodes join": ("two", [], [2, 2], "full_shard", "nothing"),
    "another strategy": ("uneven", [1], [2], "ddp", "nothing"),
    "each rank has buffers": ("with buffers", [0], [1, 1], "ddp", "nothing"),
    "wider groups": ("copies", [0], [2], "hybrid_shard", "nothing"),
    "a file is damaged": ("three", [2], [1, 1], "full_shard", "a flipped byte"),
}


def beginning(name: str) -> tuple[dict[str, Any], ...]:
    with_buffers = {"model": {"target": f"{CONFIGURED}:with_buffers"}}
    return (with_buffers,) if name == "with buffers" else ()


@pytest.fixture(scope="session")
def firsts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Trainings of five steps, whose states are in memory."""
    place = tmp_path_factory.mktemp("firsts")
    jobs = {
        name: job(place / name, "first", nodes, fsdp(strategy), until(ENDED), *beginning(name))
        for name, (nodes, strategy) in FIRST.items()
    }
    codes = run(*jobs.values())
    for one, ended in zip(jobs.values(), codes, strict=True):
        assert set(ended) == {0}, one.output()
    return jobs


@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_state_is_assembled_from_memory_on_other_ranks(
    tmp_path: Path, name: str, firsts: dict[str, Job], expected: dict[int, dict[str, Any]]
) -> None:
    first, lost, after_it, other, damage = OTHER_LAYOUTS[name]
    harm, step, _ = HARM[damage]
    nodes = range(len(FIRST[first][0]))
    for place, node in enumerate(node for node in nodes if node not in lost):
        shutil.copytree(firsts[first].memory_of(node), tmp_path / "memory" / f"node{place}")
    harm(tmp_path / "memory")
    again = job(tmp_path, "again", after_it, fsdp(other), *beginning(first))
    assert run(again) == [[0] * sum(after_it)], again.output()
    assert f"resuming after step {step}, from memory" in again.output()
    goes_on(again, step, expected)


def test_short_or_shared_memory_is_refused(tmp_path: Path, small_disk: Path) -> None:
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


def test_last_state_of_stopped_training_is_kept(tmp_path: Path) -> None:
    """Else a job that is ended to go on with more nodes would lose what came after the last."""
    endless = {"training": {"max_steps": 10**6}, "scheduler": {"total_steps": STEPS}}
    rarely = {"checkpoint": {"memory_every": 1000}}
    first = job(tmp_path, "first", TWO_NODES, endless, rarely, signal=signal.SIGTERM)
    assert run(first) == [[0, 0]]
    last = first.metrics()[-1]["step"]
    again = job(tmp_path, "again", TWO_NODES, until(last + 1), rarely)
    assert run(again) == [[0, 0]], again.output()
    assert f"resuming after step {last}, from memory" in again.output()


def test_memory_states_follow_clock_of_rank_0_by_default(
    tmp_path: Path,
) -> None:
    by_clock = {"checkpoint": {"memory_every": None}}
    first = job(tmp_path, "first", [2], SHARDED, until(3), by_clock)
    assert run(first) == [[0, 0]]
    assert "checkpoint in memory for at most 3% of the time" in first.output()
    again = job(tmp_path, "again", [2], SHARDED, until(4), by_clock)
    assert run(again) == [[0, 0]]
    assert ", from memory" in again.output()
