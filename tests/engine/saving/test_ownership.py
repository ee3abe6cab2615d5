"""The owner of a checkpoint, and the latest saved one."""

from pathlib import Path

import torch

from orchestrator.engine.ranks.ranks import Ranks
from orchestrator.engine.saving import search
from orchestrator.engine.saving.ownership import TrainingRun
from orchestrator.records import checkpoint_store
from tests.records.test_checkpoint_store import save


def test_later_saved_state_comes_first(tmp_path: Path) -> None:
    """A node that was away comes back with what an earlier attempt had saved: no step tells."""
    disk, memory = tmp_path / "disk", tmp_path / "memory/trainer1"
    memory.mkdir(parents=True)
    tmp_path.joinpath("memory").chmod(0o700)
    own, others = (TrainingRun(name, "p", model="m") for name in ("x", "other"))
    for when, step in enumerate((200, 140, 150, 160, 20)):
        place = memory if step == 150 else disk
        save(place, step, progress={"run": vars(own)}, created=100.0 + when)
    save(disk, 300, progress={"run": vars(others)}, created=900.0)
    everyone = Ranks(0, 1, 0, torch.device("cpu"), ((0, "a"),))
    found = search.all_checkpoints(
        *(lambda: checkpoint_store.list_checkpoints(disk), memory, own, everyone, print),
        disk_alone=True,
    )
    assert [(each.step, each.in_memory) for each in found.candidates] == [
        *((20, False), (160, False), (150, True), (140, False), (200, False)),
    ]
