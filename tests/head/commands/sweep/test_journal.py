"""What a sweep writes down, on disks that are full and after heads that were killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.head.commands.sweep import journal as journals
from orchestrator.head.commands.sweep.journal import Journal
from orchestrator.head.commands.sweep.slot import Slot


def new(tmp_path: Path) -> Journal:
    return journals.create(tmp_path, "s", {"words": []})


def test_half_a_line_is_none_and_what_follows_is_whole(tmp_path: Path) -> None:
    journal = new(tmp_path)
    assert journal.add(member=0) and journal.add(member=1)
    with journal.file.open("a") as file:
        file.write('{"member": 2')
    again = Journal(journal.path)
    assert [event["member"] for event in again.read()] == [0, 1]
    assert again.add(member=3)
    assert [event["member"] for event in Journal(journal.path).read()] == [0, 1, 3]


def test_what_a_full_disk_refuses_is_written_once_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, real = new(tmp_path), os.write
    assert journal.add(member=0)
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, data: real(fd, data[:5]))
        assert not journal.add(member=1) and not journal.write()
    assert journal.add(member=2)
    assert [event["member"] for event in Journal(journal.path).read()] == [0, 1, 2]


def test_a_sweep_is_found_by_its_name(tmp_path: Path) -> None:
    journal = new(tmp_path)
    assert journals.find(tmp_path, journal.name).path == journal.path
    assert journals.find(tmp_path, str(journal.path)).path == journal.path
    with pytest.raises(UsageError, match="no sweep 'x'"):
        journals.find(tmp_path, "x")
    journal.path.chmod(0o777)
    with pytest.raises(UsageError, match="could name any program to run"):
        journals.find(tmp_path, journal.name)


def test_a_sweep_that_came_with_a_repository_runs_nothing(tmp_path: Path) -> None:
    """Its file is this login's by its owner, and names an ssh_config, which names programs."""
    journal = new(tmp_path)
    (journal.path / journals.SWEEP).write_text('{"words": ["--ssh-config", "theirs"]}')
    with pytest.raises(UsageError, match="not begun by this login"):
        journals.find(tmp_path, journal.name)
    assert journals.find(tmp_path, journal.name, trusted=True).path == journal.path
    (journal.path / journals.SWEEP).write_text("half a li")
    with pytest.raises(UsageError, match="was changed"):
        journals.find(tmp_path, journal.name)


def test_a_slot_has_one_process_and_none_once_it_was_removed(tmp_path: Path) -> None:
    slot = Slot(tmp_path / "7")
    slot.make()
    assert slot.number == 7 and not slot.held and set(slot.read()) == {"since"}
    first = slot.take()
    assert first is not None and slot.held and slot.take() is None
    slot.send(place="a")
    slot.send(say="nothing")
    slot.path.open("ab").write(b'{"half')
    assert slot.read()["place"] == "a"
    slot.remove()
    os.close(first)
    assert slot.take() is None and not slot.held
    slot.make()
    assert "place" not in slot.read()


def test_what_is_of_another_type_is_said_to_be_changed_and_nobody_is_signalled(
    tmp_path: Path,
) -> None:
    journal = new(tmp_path)
    for text in ('{"words": 3}', '{"members": {"0": 1}}', '{"terms": []}', "[" * 9999, "\x80"):
        (journal.path / journals.SWEEP).write_text(text, encoding="latin-1")
        with pytest.raises(UsageError, match="was changed"):
            journals.find(tmp_path, journal.name, trusted=True).describe()
    for line in ("7", '{"member": "0"}', '{"member": -1}', '{"member": 1, "value": "x"}'):
        journal.file.write_text(f"{line}\n")
        with pytest.raises(UsageError, match="was changed"):
            list(journal.read())
    slot = journal.slot(3)
    slot.make()
    (slot.path.parent / "²").touch()
    with slot.path.open("a") as file:
        for pid in ("-1", "0", "1", '"x"'):
            file.write(f'{{"pid": {pid}, "host": "here"}}\n')
        file.write('{"place": 5}\n[]\n{"place": "/there"}\n')
    assert slot.read().keys() == {"since", "place"}
    assert journal.slots() == [slot]
