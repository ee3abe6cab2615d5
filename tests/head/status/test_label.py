"""A note and tags: what the launch said, until somebody says something else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.config.label import Label
from orchestrator.config.launch import Launch
from orchestrator.head.status import label as labels
from tests.views.report.stories import experiment


def test_what_was_said_last_counts(tmp_path: Path) -> None:
    made = experiment(tmp_path / "run", steps=0)
    record = replace(made.read_record(), launch=Launch(note="first\x1b[31m try", tag=("base",)))
    assert labels.of(made, record) == Label("first [31m try", ("base",))
    labels.change(made, record, tags=["best", "base"])
    assert labels.of(made, record) == Label("first [31m try", ("base", "best"))
    labels.change(made, record, note="", without=["base"])
    assert labels.of(made, record) == Label("", ("best",))


@pytest.mark.parametrize("text", ["", "[", '{"tags": 3}', '{"note": ["x"]}'])
def test_a_damaged_file_says_nothing(tmp_path: Path, text: str) -> None:
    made = experiment(tmp_path / "run", steps=0)
    made.write(labels.NAME, text)
    assert labels.of(made, made.read_record()) == Label()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tags": ["two words"]}, "cannot be a tag"),
        ({"tags": ["a,b"]}, "cannot be a tag"),
        ({"tags": [f"t{n}" for n in range(21)]}, "21 tags are too many"),
        ({"note": "x" * 2001}, "the note has 2001 letters"),
        ({"without": ["gone"]}, "run has no tag 'gone'"),
    ],
)
def test_what_no_table_can_show_is_refused(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    made = experiment(tmp_path / "run", steps=0)
    with pytest.raises(UsageError, match=said):
        labels.change(made, made.read_record(), **change)  # type: ignore[arg-type]
    assert not (made.path / labels.NAME).exists()
