"""The files of a job's Trainers are found, and the newest of them."""

from pathlib import Path

import pytest

from orchestrator.records.metrics import trainers


def write(outputs: Path, rank: int, trainer: int, text: str = '{"step": 1}\n') -> Path:
    path = outputs / trainers.file_name(rank, trainer)
    path.write_text(text)
    return path


def test_measured_groups_files_by_trainer_and_rank(tmp_path: Path) -> None:
    for rank, trainer in ((10, 1), (2, 1), (0, 10), (0, 2), (128, 2)):
        write(tmp_path, rank, trainer)
    (tmp_path / "rank_03_metrics.jsonl").symlink_to("/etc/passwd")
    (tmp_path / "rank_04_metrics.jsonl").mkdir()
    found = trainers.list_metrics_files(tmp_path)
    assert [(trainer, list(files)) for trainer, files in found.items()] == [
        *((1, [2, 10]), (2, [0, 128]), (10, [0])),
    ]
    assert trainers.list_metrics_files(tmp_path / "none") == {}


@pytest.mark.parametrize(
    "name",
    [
        *("rank_x_metrics.jsonl", "rank_00_metrics_1.jsonl", "rank_00_metrics_02.jsonl"),
        *("rank_000_metrics.jsonl", "rank_00_metrics_0.jsonl", "rank_00_metrics.jsonl.new"),
        *("rank_\u0660\u0660_metrics.jsonl", "rank_00_metrics_a.jsonl", ".rank_00_metrics.jsonl"),
    ],
)
def test_other_names_are_no_metrics(name: str) -> None:
    assert trainers.FILE.fullmatch(name) is None


@pytest.mark.parametrize("pair", [(1, 0), (2, 0), (17, 123)])
def test_file_names_have_rank_and_trainer(pair: tuple[int, int]) -> None:
    known = trainers.FILE.fullmatch(trainers.file_name(pair[1], pair[0]))
    assert known and (int(known[2] or 1), int(known[1])) == pair


def test_newest_is_last_trainer_with_metrics(tmp_path: Path) -> None:
    assert trainers.newest_metrics_files(tmp_path) == {}
    first = write(tmp_path, 0, 1, "")
    assert trainers.newest_metrics_files(tmp_path) == {0: first}
    second = write(tmp_path, 0, 2)
    write(tmp_path, 0, 3, "")  # made, and it has not begun
    assert trainers.newest_metrics_files(tmp_path) == {0: second}
