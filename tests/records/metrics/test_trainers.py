"""The files of a job's Trainers are found, and those that are at work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.records.metrics import trainers

NOW = 1_700_000_000.0


def write(outputs: Path, rank: int, trainer: int, ago: float, text: str = "{}\n") -> Path:
    path = outputs / trainers.file_name(rank, trainer)
    path.write_text(text)
    os.utime(path, (NOW - ago, NOW - ago))
    return path


def test_files_are_found_by_trainer_and_rank(tmp_path: Path) -> None:
    for rank, trainer in ((10, 1), (2, 1), (0, 10), (0, 2), (128, 2)):
        write(tmp_path, rank, trainer, 0)
    (tmp_path / "rank_03_metrics.jsonl").symlink_to("/etc/passwd")
    (tmp_path / "rank_04_metrics.jsonl").mkdir()
    found = trainers.every(tmp_path)
    assert [(trainer, list(files)) for trainer, files in found.items()] == [
        *((1, [2, 10]), (2, [0, 128]), (10, [0])),
    ]
    assert trainers.every(tmp_path / "none") == {}


@pytest.mark.parametrize(
    "name",
    [
        *("rank_x_metrics.jsonl", "rank_00_metrics_1.jsonl", "rank_00_metrics_02.jsonl"),
        *("rank_000_metrics.jsonl", "rank_00_metrics_0.jsonl", "rank_00_metrics.jsonl.new"),
        *("rank_\u0660\u0660_metrics.jsonl", "rank_00_metrics_a.jsonl", ".rank_00_metrics.jsonl"),
    ],
)
def test_each_file_has_one_name(name: str) -> None:
    assert trainers.of_name(name) is None


@pytest.mark.parametrize("pair", [(1, 0), (2, 0), (17, 123)])
def test_a_name_tells_what_it_was_made_of(pair: tuple[int, int]) -> None:
    assert trainers.of_name(trainers.file_name(pair[1], pair[0])) == pair


def test_the_one_that_wrote_last_is_at_work(tmp_path: Path) -> None:
    assert trainers.newest(tmp_path) == (1, {})
    first = write(tmp_path, 0, 1, 4000)
    assert trainers.newest(tmp_path) == (1, {0: first})
    second = write(tmp_path, 0, 2, 10)
    assert trainers.at_work(tmp_path) == {2: {0: second}}
    write(tmp_path, 0, 3, 0, "")  # made, and it has not begun
    assert trainers.newest(tmp_path) == (2, {0: second})
    write(tmp_path, 0, 1, 0)
    write(tmp_path, 0, 2, 500)
    assert trainers.newest(tmp_path)[0] == 1  # the program has come back to the first


def test_two_that_take_turns_do_not_change_places(tmp_path: Path) -> None:
    for ago in ((0, 5), (5, 0)):
        write(tmp_path, 0, 1, ago[0])
        write(tmp_path, 0, 2, ago[1])
        assert list(trainers.at_work(tmp_path)) == [1, 2]
        assert trainers.newest(tmp_path)[0] == 2


def test_of_a_hundred_copied_files_the_last_are_told(tmp_path: Path) -> None:
    for trainer in range(1, 101):
        write(tmp_path, 0, trainer, 0)  # rsync without -t: all times are equal
    assert list(trainers.at_work(tmp_path)) == list(range(93, 101))
