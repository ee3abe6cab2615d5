"""Frozen weights are written to disk once: each checkpoint has them, as a link where it can."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from orchestrator.engine.saving.carry import identity_of
from orchestrator.engine.saving.writer import Saved, Writer
from orchestrator.records import checkpoint_store
from orchestrator.records.checkpoint_store import FileRecord
from tests.engine.core.test_parity import fsdp
from tests.engine.saving.test_resume import job, losses, resumed, saving
from tests.engine.worlds import Job, run

pytestmark = pytest.mark.slow

FROZEN: dict[str, Any] = {"model": {"target": "tests.engine.programs.configured:frozen"}}
DRIFTING = {"model": {**FROZEN["model"], "args": {"drifts": True}}}
BACKGROUND = {"checkpoint": {"asynchronous": True}}
STEPS = 12


def steps_of(job: Job, node: int = 0) -> dict[int, Path]:
    found = (job.experiment(node) / "outputs/checkpoints").glob("step_*")
    return {int(path.name[5:]): path for path in sorted(found)}


def constant(step: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in sorted(step.glob("__*_constant_*"))}


def until(steps: int) -> list[dict[str, Any]]:
    return [{"training": {"max_steps": steps}}, {"scheduler": {"total_steps": STEPS}}]


def test_a_checkpoint_that_is_published_before_a_rank_has_seen_its_file_is_saved(
    tmp_path: Path,
) -> None:
    call = "tests.engine.programs.keeping:saved_by_a_late_rank"
    late = Job(str(tmp_path / "late"), [2], {}, call=call)
    assert run(late) == [[0, 0]], late.output()
    assert late.output().count("saved step ") == 2, late.output()


@pytest.mark.parametrize("strategy", ["full_shard", "ddp"])
def test_each_checkpoint_has_them_and_stands_for_itself(tmp_path: Path, strategy: str) -> None:
    """Whatever becomes of the others: the next run goes on from the last one alone."""
    whole = job(tmp_path, "whole", [2], fsdp(strategy), FROZEN)
    first = job(tmp_path, "first", [2], fsdp(strategy), FROZEN, saving(2, keep=4), BACKGROUND,
                *until(8))  # fmt: skip
    assert run(whole, first) == [[0, 0]] * 2, first.output()
    steps = steps_of(first)
    assert constant(steps[2])
    assert constant(steps[4]) != constant(steps[2]), "where one is damaged, the next is not"
    assert [constant(steps[step]) for step in (6, 8)] == [constant(steps[step]) for step in (2, 4)]
    assert re.search(r"saved step 8: .* of it linked; training waited", first.output())
    for path in steps.values():
        assert checkpoint_store.verify(checkpoint_store.load(path)) == []
    for step in (2, 4, 6):
        shutil.rmtree(steps[step])
    again = job(tmp_path, "again", [2], fsdp(strategy), FROZEN, saving(), BACKGROUND, resumed())
    other = job(tmp_path, "other", [1], fsdp("full_shard"), FROZEN, resumed())
    for each in (again, other):
        place = Path("outputs/checkpoints")
        shutil.copytree(first.experiment() / place, each.experiment() / place)
    assert run(again, other) == [[0, 0], [0]], again.output() + other.output()
    assert losses(again) == {step: loss for step, loss in losses(whole).items() if step > 8}
    for step, loss in losses(other).items():
        assert loss == pytest.approx(losses(whole)[step], abs=1e-5)


def test_a_frozen_weight_that_changes_is_saved_as_it_is(tmp_path: Path) -> None:
    whole = job(tmp_path, "whole", [2], fsdp("ddp"), DRIFTING)
    first = job(tmp_path, "first", [2], fsdp("ddp"), DRIFTING, saving(keep=3), BACKGROUND,
                *until(8))  # fmt: skip
    again = job(tmp_path, "first", [2], fsdp("ddp"), DRIFTING, saving(), resumed())
    assert run(whole, first, again) == [[0, 0]] * 3, again.output()
    assert losses(again) == losses(whole)


def test_without_links_and_after_somebody_wrote_to_it_it_is_written(tmp_path: Path) -> None:
    name, to = "__0_constant_0.distcp", tmp_path / "to"
    file = tmp_path / name
    file.write_bytes(b"weights")
    saved = Saved(tmp_path, {name: FileRecord(7, "")}, {name: identity_of(file)})
    assert saved.link(name, to)
    assert to.samefile(file)
    assert not saved.link(name, to), "something is there"
    to.unlink()
    assert not saved.link(name, tmp_path / "nowhere/to")
    os.utime(file, (1, 1))
    assert not saved.link(name, to)
    assert not to.exists()
    other = tmp_path / "other"
    other.write_bytes(b"weights")
    os.utime(other, ns=(0, saved.identities[name][-1]))
    other.replace(file)
    assert not saved.link(name, to)
    file.unlink()
    file.symlink_to("/etc/passwd")
    assert not saved.link(name, to)
    assert not os.path.lexists(to)


def written_to(
    path: Path, state: dict[str, Tensor], before: Saved | None, constant: tuple[str, ...]
) -> tuple[Saved, Path | None]:
    """Save as a program alone does, and return the file of what has not changed."""
    writer = Writer(path, constant, before, apart=False)
    save(state, storage_writer=writer, no_dist=True)
    files = writer.digests(sorted(each.name for each in path.iterdir()))
    saved = Saved(path, files, writer.identities(), writer.results)
    return saved, next((path / name for name in saved.identities), None)


def test_what_is_linked_is_never_written_into(tmp_path: Path) -> None:
    """A save that failed may have left its link: the next one under this name is another file."""
    state, constant = {"frozen": torch.ones(3), "head": torch.ones(2)}, ("frozen",)
    first, file = written_to(tmp_path / "one", state, None, constant)
    assert file is not None
    content = file.read_bytes()
    second, same = written_to(tmp_path / "two", state, first, constant)
    assert same is not None
    assert same.samefile(file)
    record = first.files[file.name]
    assert second.files[same.name] == record == checkpoint_store.digest(same)
    (tmp_path / "two/.metadata").unlink()
    written_to(tmp_path / "two", {**state, "frozen": torch.zeros(3)}, None, constant)
    assert file.read_bytes() == content
    more = {**state, "frozen": torch.ones(3), "head": torch.ones(5)}
    _, third = written_to(tmp_path / "three", more, first, constant)
    assert third is not None
    assert third.samefile(file)


def test_a_file_that_holds_more_than_what_is_unchanged_is_not_linked(tmp_path: Path) -> None:
    state = {"frozen": torch.ones(3), "thawed": torch.ones(2)}
    first, file = written_to(tmp_path / "one", state, None, ("frozen", "thawed"))
    _, other = written_to(tmp_path / "two", state, first, ("frozen",))
    assert file is not None
    assert other is not None
    assert not other.samefile(file)


def test_copies_on_other_nodes_are_links_too(tmp_path: Path) -> None:
    """Where one checkpoint is kept, it shares its file with the one that it replaces."""
    more, alone = (
        job(tmp_path, f"keep {keep}", [1, 1], fsdp("full_shard"), FROZEN, BACKGROUND,
            saving(2, copies=2, keep=keep), *until(8), own_disks=True)
        for keep in (4, 1)
    )  # fmt: skip
    assert run(more, alone) == [[0, 0]] * 2, more.output()
    for node in (0, 1):
        steps = steps_of(more, node)
        assert [*constant(steps[8])] == ["__0_constant_0.distcp", "__1_constant_0.distcp"]
        assert constant(steps[8]) == constant(steps[4])
        (last,) = steps_of(alone, node).values()
        for path in (steps[8], last):
            assert checkpoint_store.verify(checkpoint_store.load(path)) == []
    assert re.search(r"saved step 4: .* of it linked", alone.output())
    assert "saved step 4" in more.output()
    assert not re.search(r"saved step 4: .* of it linked", more.output())
