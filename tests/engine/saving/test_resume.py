"""Saved, killed, flipped, resumed elsewhere: the run goes on as if nothing had happened."""

import random
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.common.version import __version__
from orchestrator.records import checkpoint_store
from tests.engine.core.test_parity import accumulate, config, fsdp
from tests.engine.worlds import NAME, Job, run

pytestmark = pytest.mark.slow

STEPS = 12
SAVED, METRICS = "TEST_SAVED", "outputs/rank_00_metrics.jsonl"
WHERE = {"training": {"max_steps": STEPS}}


def saving(every: int = 4, **more: Any) -> dict[str, Any]:
    return {"checkpoint": {"steps": every, "at_end": False, "asynchronous": True, **more}}


def resumed(resume: str | Path = "auto", **more: Any) -> dict[str, Any]:
    return saving(resume=str(resume), **more)


def job(directory: Path, name: str, nodes: list[int], *changes: dict[str, Any], **more: Any) -> Job:
    return Job(str(directory / name), nodes, config(WHERE, *changes, world=sum(nodes)), **more)


def losses(job: Job, rank: int = 0) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in job.metrics(rank) if "loss" in line}


def checkpoints(job: Job, node: int = 0) -> list[str]:
    return sorted(p.name for p in (job.experiment(node) / "outputs/checkpoints").iterdir())


LAYOUTS: dict[str, tuple[list[int], list[dict[str, Any]]]] = {
    "the same": ([2, 2], []),
    "alone": ([1], []),
    "three, uneven, in two": ([3], [fsdp("full_shard"), accumulate(2)]),
    "ddp": ([2], [fsdp("ddp")]),
}


def test_resume_on_any_layout_continues_curve(tmp_path: Path) -> None:
    """Bit for bit on the same layout; elsewhere within the rounding of another order of sums."""
    whole = job(tmp_path, "whole", [2, 2], saving(keep=9))
    assert run(whole) == [[0] * 4]
    directory = whole.experiment() / "outputs/checkpoints/step_00000004"
    jobs = {
        name: job(tmp_path, name, nodes, resumed(directory), *how)
        for name, (nodes, how) in LAYOUTS.items()
    }
    codes = run(*jobs.values())
    expected = losses(whole)
    for (name, one), ended in zip(jobs.items(), codes, strict=True):
        assert set(ended) == {0}, one.output()
        assert f"resuming after step 4, from {directory}: " in one.output()
        found = losses(one)
        assert list(found) == list(range(5, STEPS + 1)), name
        for step, value in found.items():
            exact = value == expected[step]
            assert exact or (
                name != "the same" and value == pytest.approx(expected[step], abs=1e-5)
            )
        assert one.metrics()[-1]["tokens"] == whole.metrics()[-1]["tokens"]


def test_two_runs_with_one_seed_are_equal(tmp_path: Path) -> None:
    exact = {
        "training": {"deterministic": True, "max_steps": 4},
        "model": {"target": None, "args": {}},
    }
    one, two = (job(tmp_path, name, [2], exact) for name in ("one", "two"))
    for each in (one, two):
        each.config["training"]["loss"] = None
        each.config["model"] = {"model_dim": 32, "dropout": 0.1}
        each.config["dataset"] = {"sequence_length": 16}
    assert run(one, two) == [[0] * 2] * 2
    assert losses(one) == losses(two)


def test_killed_training_resumes_to_same_end(tmp_path: Path) -> None:
    """So many times SIGKILL of all ranks, also while a checkpoint is written or pruned."""
    steps = {"training": {"max_steps": 10**6}, "scheduler": {"total_steps": 10**6}}
    shared = {"directory": str(tmp_path / "checkpoints"), "resume": "auto", "keep": 2}
    chance, lives = random.Random(20), 4
    jobs = [
        job(
            tmp_path,
            f"life{n}",
            [2],
            steps,
            saving(2, **shared),
            signal=signal.SIGKILL,
            # One rank has a checkpoint, independent of the others' results.
            after=('"saved_step"', 1) if n == 0 else ('"loss"', 3),
            after_seconds=chance.random() * 0.15,
        )
        for n in range(lives)
    ]
    codes = run(*jobs)
    assert codes == [[-9, -9]] * lives
    # A life may end further on than the next one, which begins at what was saved, comes.
    last = max(step for one in jobs for rank in range(2) for step in losses(one, rank))
    whole = job(tmp_path, "whole", [2], {**steps, "training": {"max_steps": last}},
                {"checkpoint": {"at_end": False}})  # fmt: skip
    assert run(whole) == [[0, 0]]
    expected = losses(whole)
    for one in jobs:
        for rank in range(2):
            found = losses(one, rank)
            assert found == {step: expected[step] for step in found}
    begun = [min(losses(one)) for one in jobs]
    # A run never starts before the last save.
    assert begun == sorted(begun)
    assert begun[-1] > begun[0]
    left = [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.startswith("step_")]
    assert 1 <= len(left) <= 3


def test_damaged_checkpoint_falls_back_to_previous(tmp_path: Path) -> None:
    first = job(tmp_path, "a", [2], saving())
    assert run(first) == [[0, 0]]
    places = first.experiment() / "outputs/checkpoints"
    shard = places / "step_00000012/__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    longer = {"training": {"max_steps": 14}, "scheduler": {"total_steps": STEPS}}
    again = job(tmp_path, "b", [2], resumed(first.experiment()), longer)
    assert run(again) == [[0, 0]]
    assert "step 12 cannot be trusted: __1_0.distcp is damaged" in again.output()
    assert "resuming after step 8" in again.output()
    assert losses(again)[12] == losses(first)[12]
    for directory in places.glob("step_*"):
        (directory / "__0_0.distcp").write_bytes(b"")
    refused = job(tmp_path, "c", [2], resumed(first.experiment()))
    assert run(refused) == [[1, 1]]
    assert "none of its checkpoints verifies" in refused.output()


def test_full_disk_costs_one_checkpoint(tmp_path: Path, small_disk: Path) -> None:
    """Ballast after the first save: the next one fails, the first stays, training goes on. The last
    one is all that there is of the training: without it, a run has failed."""
    there = {"directory": str(small_disk / "ckpt"), "asynchronous": True}
    first = job(tmp_path, "a", [2], saving(4, **there), {"training": {"max_steps": 4}})
    assert run(first) == [[0, 0]]
    (small_disk / "ballast").write_bytes(b"x" * (free(small_disk) - 8192))
    again = job(tmp_path, "b", [2], saving(4, resume="auto", **there),
                {"scheduler": {"total_steps": 4}})  # fmt: skip
    assert run(again) == [[1, 1]]
    assert again.output().count("WARNING: NOT SAVED: step 8: rank ") == 1
    assert "; step 4 is on the disk; training continues" in again.output()
    why = r"the last checkpoint, of step 12, could not be saved: rank \d on .*: No space left"
    assert [rank for rank in (0, 1) if re.search(why, again.output(rank))]
    assert max(losses(again)) == STEPS
    assert sorted(p.name for p in (small_disk / "ckpt").iterdir()) == ["step_00000004"]
    (small_disk / "ballast").unlink()
    room = {"directory": str(small_disk / "room"), "keep": 9}
    probe = job(tmp_path, "r", [2], saving(4, **room), {"training": {"max_steps": 4}})
    assert run(probe) == [[0, 0]]
    one = sum(path.stat().st_size for path in (small_disk / "room").glob("*/*"))
    two = job(tmp_path, "s", [2], saving(4, resume="auto", **room), {"training": {"max_steps": 8}},
              {"scheduler": {"total_steps": 4}})  # fmt: skip
    assert run(two) == [[0, 0]]
    (small_disk / "ballast").write_bytes(b"x" * (free(small_disk) - one // 2))
    tight = job(tmp_path, "t", [2], saving(4, resume="auto", **room),
                {"scheduler": {"total_steps": 4}})  # fmt: skip
    # The oldest checkpoint is removed for the last one.
    assert run(tight) == [[0, 0]], tight.output()
    left = sorted(p.name for p in (small_disk / "room").iterdir())
    assert left == ["step_00000008", "step_00000012"]
    (small_disk / "ballast").unlink()
    third = job(tmp_path, "c", [2], resumed(small_disk / "ckpt"))
    assert run(third) == [[0, 0]]
    assert "resuming after step 4" in third.output()


def free(directory: Path) -> int:
    return shutil.disk_usage(directory).free


def test_nodes_without_shared_disk_keep_their_own(tmp_path: Path) -> None:
    one = job(tmp_path, "a", [1, 1], saving(4, keep=2), own_disks=True)
    assert run(one) == [[0] * 2]
    for node in range(2):
        assert checkpoints(one, node) == ["step_00000008", "step_00000012"]
    two = job(tmp_path, "a", [1, 1], resumed(keep=2), {"training": {"max_steps": 16}},
              own_disks=True)  # fmt: skip
    shutil.rmtree(one.experiment(1) / "outputs/checkpoints/step_00000012")
    assert run(two) == [[0] * 2]
    # The other node has sent its own part.
    assert "resuming after step 12" in two.output()


def test_auto_resumes_newest_run_of_same_name(tmp_path: Path) -> None:
    first = job(tmp_path, "a", [1], saving())
    assert run(first) == [[0]]
    newest = checkpoint_store.list_checkpoints(first.experiment() / "outputs/checkpoints")[
        0
    ].progress
    assert newest["config"]["training"]["max_steps"] == STEPS
    assert newest["versions"] == {"torch": torch.__version__, "orchestrator": __version__}
    elsewhere = tmp_path / "b"
    shutil.copytree(tmp_path / "a" / NAME, elsewhere / NAME.replace("2026", "2025"))
    again = job(tmp_path, "b", [1], resumed(), {"training": {"max_steps": 14}})
    assert run(again) == [[0]]
    assert f"resuming after step 12, from {elsewhere}" in again.output()
    # It wrote none, because step 14 is no multiple of four.
    assert checkpoints(again) == []
    new = job(tmp_path, "c", [1], resumed())
    assert run(new) == [[0]]
    directory = new.experiment() / "outputs/checkpoints"
    assert f"nothing to resume from in {directory}: starting from the beginning" in new.output()


def test_unfit_checkpoint_is_refused(tmp_path: Path) -> None:
    first = job(tmp_path, "a", [2], saving())
    other = job(tmp_path, "b", [2], resumed(first.experiment()), {"model": {"args": {"dim": 4}}})
    sgd = job(tmp_path, "c", [2], resumed(first.experiment()), {"optimizer": {"name": "sgd"}})
    assert run(first, other, sgd) == [[0] * 2, [1] * 2, [1] * 2]
    for refused in (other, sgd):
        assert "does not fit this model and optimizer" in refused.output()
        assert "Traceback" not in refused.output()


def test_engine_without_experiment_says_it_saves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    by_hand = job(tmp_path, "a", [1], env={"ORCHESTRATOR_EXPERIMENT": ""})
    assert run(by_hand) == [[0]]
    assert "nothing of it is saved: checkpoint.directory saves" in by_hand.output()
