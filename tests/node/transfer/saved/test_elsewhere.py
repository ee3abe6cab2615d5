"""Which places that ranks noted are named at the end of a job."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.transfer.saved import elsewhere
from orchestrator.protocol.requests.transfer import WrittenPlace
from tests.node.start.test_next_spec import FIRST

FOREVER = float("inf")


def run_with(tmp_path: Path, *notes: tuple[str, str]) -> RunDir:
    """A run directory with these notes, of places below `tmp_path`."""
    run = RunDir("e-abc", 0)
    run.create()
    (tmp_path / "work").mkdir(exist_ok=True)
    run.write_spec(FIRST.replace(env={}, workdir=str(tmp_path / "work")))
    os.utime(run.spec, (1e9, 1e9))
    lines = [json.dumps([kind, str(tmp_path / path)]) + "\n" for kind, path in notes]
    Path(run.path, "written_0").write_text("".join(lines[::2]) + '["new", "/x')  # cut short
    Path(run.path, "written_1").write_text("no note\n[3, 4]\n" + "".join(lines[1::2]))
    return run


def write(tmp_path: Path, *paths: str) -> None:
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"some")


def shown(places: tuple[WrittenPlace, ...], tmp_path: Path) -> dict[str, tuple[int, int]]:
    return {os.path.relpath(place.path, tmp_path): (place.files, place.size) for place in places}


def test_the_outermost_places_that_have_something_new(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "new/a/1", "new/2", "few/1", "few/2", "many/1", "many/2", "many/3", "many/4")
    write(tmp_path, "known/new", "work/out/x", "work/y")
    (tmp_path / "empty").mkdir()
    run = run_with(
        tmp_path,
        *(("new", "new"), ("new", "new/a"), ("file", "new/2"), ("new", "gone"), ("known", "empty")),
        *(("file", f"many/{number}") for number in range(1, 5)),
        *(("file", "few/1"), ("file", "few/2"), ("file", "few/gone"), ("known", "known")),
        *(("known", "work/out"), ("file", "work/y")),
    )
    places = elsewhere.written(run, FOREVER)
    assert shown(places, tmp_path) == {
        **{"few/1": (1, 4), "few/2": (1, 4), "known": (1, 4), "many": (4, 16), "new": (2, 8)},
        **{"work/out": (1, 4), "work/y": (1, 4)},  # the user has named the directory: it stays
    }
    status = os.lstat(tmp_path / "new")
    (new,) = (place for place in places if place.path.endswith("/new"))
    assert (new.inode, new.changed) == (status.st_ino, status.st_ctime_ns)
    assert not new.through and not new.of_workdir and places[-1].of_workdir
    monkeypatch.setattr(elsewhere, "mount", lambda *_: ("/", "nfs4", "server:/x"))
    assert elsewhere.written(run, FOREVER) == ()


def test_what_was_there_before_is_not_counted(tmp_path: Path, home: Path) -> None:
    write(tmp_path, "known/x")
    run = run_with(tmp_path, ("known", "known"))
    assert shown(elsewhere.written(run, FOREVER), tmp_path) == {"known": (1, 4)}
    os.utime(run.spec, (4e9, 4e9))  # the job began later
    assert elsewhere.written(run, FOREVER) == ()


def test_what_is_ours_comes_home_and_a_link_leads_out_of_a_snapshot(
    tmp_path: Path, home: Path
) -> None:
    root = home / "code/snapshots/x-0/u/w"
    write(home, "code/snapshots/x-0/u/w/out/x", "code/snapshots/x-0/u/y")
    write(tmp_path, "data/made")
    (root / "data").symlink_to(tmp_path / "data")
    run = run_with(tmp_path, ("new", "data/made"))
    Path(run.spec).unlink()
    run.write_spec(FIRST.replace(env={}, workdir=str(root)))
    paths = (tmp_path / "data/made", root / "out", root.parent / "y")
    notes = "".join(json.dumps(["file", str(path)]) + "\n" for path in paths)
    Path(run.path, "written_0").write_text(notes)
    (place,) = elsewhere.written(run, FOREVER)
    assert (place.path, place.through) == (str(tmp_path / "data/made"), "data")


def test_of_a_program_that_notes_nothing_its_directory_is_looked_at(
    tmp_path: Path, home: Path
) -> None:
    """And what is new beside that. Hidden files, links and what is older are not named."""
    write(tmp_path, "p/work/out/a/x", "p/work/y", "p/work/.git/z", "p/outputs/x", "p/old/x")
    (tmp_path / "p/work/link").symlink_to("/etc")
    os.utime(tmp_path / "p/old", (1e8, 1e8))
    run = run_with(tmp_path)
    for kind, names in {"program": ["p/outputs", "p/work/out", "p/work/y"], "script": []}.items():
        target = FIRST.target.replace(kind=kind)
        Path(run.spec).unlink()
        run.write_spec(FIRST.replace(workdir=str(tmp_path / "p/work"), target=target))
        os.utime(run.spec, (1e9, 1e9))
        assert [*shown(elsewhere.written(run, FOREVER), tmp_path)] == names


def test_a_large_place_is_not_walked_to_its_end(tmp_path: Path, home: Path) -> None:
    write(tmp_path, "new/1", "new/2")
    (place,) = elsewhere.written(run_with(tmp_path, ("new", "new")), 0.0)
    assert place.more and place.files == 0
