"""Records of a sweep's members in its journal, and how they are read."""

from pathlib import Path

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.head.commands.sweep import journal as journals
from orchestrator.head.commands.sweep.journal import About, Journal, MemberState


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return journals.create_journal(tmp_path, "s", About("acc", "most", 2))


def test_read_yields_whole_lines_only(journal: Journal) -> None:
    journal.add(MemberState(0))
    journal.add(MemberState(1, values={"x": "1"}))
    with (journal.path / journals.JOURNAL).open("a") as file:
        file.write('{"member": 2')
    events = list(Journal(journal.path).read())
    assert [event.member for event in events] == [0, 1] and events[1].values == {"x": "1"}
    assert Journal(journal.path).describe() == About("acc", "most", 2)


def test_known_as_finds_sweep_by_name_or_directory(journal: Journal, tmp_path: Path) -> None:
    assert journals.find_journal(tmp_path, journal.name) == journal
    assert journals.find_journal(tmp_path, str(journal.path)) == journal
    assert journals.find_journal(tmp_path, "x") is None


def test_read_refuses_values_of_wrong_type(journal: Journal) -> None:
    for text in ('{"metric": 3}', '{"count": -1}', "[" * 9999, "\x80"):
        (journal.path / journals.SWEEP).write_text(text, encoding="latin-1")
        with pytest.raises(UsageError, match="was changed"):
            journal.describe()
    for line in ("7", '{"member": "0"}', '{"member": -1}', '{"member": 1, "value": "x"}'):
        (journal.path / journals.JOURNAL).write_text(f"{line}\n")
        with pytest.raises(UsageError, match="was changed"):
            list(journal.read())
