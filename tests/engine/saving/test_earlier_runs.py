from pathlib import Path
from typing import Any

from orchestrator.common.errors import CheckFailed
from orchestrator.engine.saving.search import search_for_newest
from tests.records.test_checkpoint_store import save


def of_a_trainer(progress: Any) -> None:
    if progress["endless"]:
        raise CheckFailed("it is the engine's")


def checkpoints(experiments: Path, name: str) -> Path:
    return experiments / name / "outputs/checkpoints"


def found(experiments: Path, name: str) -> list[int]:
    return [
        one.step
        for one in search_for_newest(
            checkpoints(experiments, name), searches=True, accept=of_a_trainer, say=print
        )()
    ]


def test_newest_run_of_same_name_is_found(tmp_path: Path) -> None:
    for day, step in ((1, 30), (2, 20)):
        save(checkpoints(tmp_path, f"mine_2026010{day}_000000"), step, progress={"endless": False})
    save(checkpoints(tmp_path, "other_20260103_000000"), 40, progress={"endless": False})
    assert found(tmp_path, "mine_20260104_000000") == [20]


def test_run_of_other_kind_of_program_is_skipped(tmp_path: Path) -> None:
    """Programs share the name by default: the engine's run is no reason for a Trainer to fail."""
    save(checkpoints(tmp_path, "multinode_20260101_000000"), 3, progress={"endless": False})
    save(checkpoints(tmp_path, "multinode_20260102_000000"), 9, progress={"endless": True})
    assert found(tmp_path, "multinode_20260103_000000") == [3]
