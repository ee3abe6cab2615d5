"""Checkpoints are whole or absent after kills, bit flips, truncation and foreign writes."""

import errno
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.common.errors import JobFailed, UsageError
from orchestrator.records import checkpoint_store
from orchestrator.records.checkpoint_store import Checkpoint, FileRecord, Manifest

FILES = {".metadata": b"about", "__0_0.distcp": b"a" * 1000, "__1_0.distcp": b"b" * 1000}


def write(
    directory: Path, step: int, files: Mapping[str, bytes] = FILES, token: str = "run"
) -> dict[str, FileRecord]:
    """Write a checkpoint's files as the ranks do before it is published."""
    place = checkpoint_store.partial_path(directory, step, token)
    place.mkdir(parents=True)
    for name, content in files.items():
        (place / name).write_bytes(content)
    return {name: checkpoint_store.describe_file(place / name) for name in files}


def publish(
    place: Path,
    directory: Path,
    step: int,
    progress: Any,
    world: int,
    files: Mapping[str, FileRecord],
) -> Path:
    manifest = Manifest(step, time.time(), progress, world, files)
    checkpoint_store.write_manifest(place, directory, manifest, list(files))
    return checkpoint_store.put_in_place(place, directory, step)


def save(
    directory: Path,
    step: int,
    files: Mapping[str, bytes] = FILES,
    progress: Any = None,
    created: float | None = None,
) -> Path:
    records = write(directory, step, files)
    place = checkpoint_store.partial_path(directory, step, "run")
    final = publish(place, directory, step, progress, 2, records)
    if created is not None:
        change(final, created=created)
    return final


def steps(directory: Path) -> list[int]:
    return [one.step for one in checkpoint_store.list_checkpoints(directory)]


def good(directory: Path) -> list[Checkpoint]:
    """Those that verify; what only looks whole must not exist."""
    found = [one for one in checkpoint_store.list_checkpoints(directory) if one.complete]
    assert [checkpoint_store.verify_checkpoint(one) for one in found] == [[]] * len(found)
    return found


def listing(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def change(place: Path, **fields: Any) -> None:
    """Other values in the manifest."""
    manifest = json.loads((place / "manifest.json").read_text())
    (place / "manifest.json").write_text(json.dumps({**manifest, **fields}))


# -- publishing -------------------------------------------------------------------------------


def test_published_checkpoint_is_found(tmp_path: Path) -> None:
    progress = {"tokens": 12, "rng": [1, 2.5, None, "ü"], "deep": {"a": True}}
    before = time.time()
    for step in (20, 120, 3):
        place = save(tmp_path, step, progress={**progress, "step": step})
        assert place == tmp_path / f"step_{step:08d}" == checkpoint_store.final_path(tmp_path, step)
    assert listing(tmp_path) == ["step_00000003", "step_00000020", "step_00000120"]
    found = checkpoint_store.list_checkpoints(tmp_path)
    assert [one.step for one in found] == [120, 20, 3]
    newest = found[0]
    assert newest.path == tmp_path / "step_00000120"
    assert newest.progress == {**progress, "step": 120}
    assert (newest.world, newest.size, newest.complete, newest.problem) == (2, 2005, True, "")
    assert before <= newest.created <= time.time()
    assert set(newest.files) == set(FILES)
    assert len(good(tmp_path)) == 3


def test_manifest_has_documented_format(tmp_path: Path) -> None:
    place = save(tmp_path, 7, {".metadata": b"", "__0_0.distcp": b"abc"}, {"k": 1})
    manifest = json.loads((place / "manifest.json").read_text())
    assert isinstance(manifest.pop("created"), float)
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert manifest == {
        "format": 1,
        "step": 7,
        "progress": {"k": 1},
        "world": 2,
        "files": {
            ".metadata": {"size": 0, "sha256": empty},
            "__0_0.distcp": {"size": 3, "sha256": abc},
        },
        "save": "",
        "hosts": {},
    }


def test_saving_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 5, progress="old")
    save(tmp_path, 5, {".metadata": b"new"}, progress="new")
    assert listing(tmp_path) == ["step_00000005"]
    assert [one.progress for one in good(tmp_path)] == ["new"]


@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_publish_refuses_name_that_is_taken(tmp_path: Path, kind: str) -> None:
    place = checkpoint_store.final_path(tmp_path, 5)
    (tmp_path / "elsewhere").mkdir()
    if kind == "link":
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.touch() if kind == "file" else place.mkdir()
    with pytest.raises(JobFailed, match="already exists, and is not a checkpoint"):
        save(tmp_path, 5)
    assert place.is_symlink() == (kind == "link")
    assert (tmp_path / "elsewhere").is_dir()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda place, files: (place / ".metadata").unlink(), ".metadata is missing"),
        (lambda place, files: (place / ".metadata").write_bytes(b""), "0 bytes instead of 5"),
        (lambda place, files: files.clear(), "it has no files"),
        (lambda place, files: files.update({"../x": FileRecord(0, "")}), "'../x' is not the name"),
        (lambda place, files: files.update({"\ud800": FileRecord(0, "")}), "is not the name"),
        (lambda place, files: shutil.rmtree(place), "is missing, and 2 more files"),
    ],
)
def test_publish_refuses_incomplete_files(
    tmp_path: Path, spoil: Callable[[Path, dict[str, FileRecord]], None], words: str
) -> None:
    files = write(tmp_path, 5)
    place = checkpoint_store.partial_path(tmp_path, 5, "run")
    spoil(place, files)
    with pytest.raises(JobFailed, match=words):
        publish(place, tmp_path, 5, None, 2, files)
    assert steps(tmp_path) == []


# -- killed -----------------------------------------------------------------------------------

CALLS = ("rename", "replace", "fsync", "open", "unlink", "rmdir")


class Killed(BaseException):
    """No `except OSError` sees it, as none sees SIGKILL."""


@contextmanager
def ends_at(number: int, failure: BaseException, *, once: bool) -> Iterator[None]:
    """The call of that number to the file system fails; after a kill, so do all that follow."""
    count = itertools.count(1)

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*args: Any, **options: Any) -> Any:
            now = next(count)
            if now == number or (now > number and not once):
                raise failure
            return call(*args, **options)

        return instead

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, counted(getattr(os, name)))
        yield
        if next(count) <= number:
            raise LookupError("there are no more calls")


def first_save(directory: Path) -> Callable[[], object]:
    save(directory, 1, progress="old")
    records = write(directory, 2)
    place = checkpoint_store.partial_path(directory, 2, "run")
    return lambda: publish(place, directory, 2, "new", 2, records)


def prune(directory: Path) -> Callable[[], object]:
    for step in (1, 2, 3):
        save(directory, step)
    return lambda: checkpoint_store.prune_checkpoints(directory, 1)


def clean(directory: Path) -> Callable[[], object]:
    for step in (1, 2, 3):
        save(directory, step)
    shutil.copytree(directory / "step_00000002", directory / ".step_00000002.c.gone")
    write(directory, 4, token="earlier")
    return lambda: checkpoint_store.remove_interrupted(directory, "later")


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("operation", [first_save, prune, clean])
@pytest.mark.parametrize(("failure", "once"), [(Killed(), False), (FULL, True)])
def test_kill_or_error_leaves_whole_checkpoints(
    tmp_path: Path,
    operation: Callable[[Path], Callable[[], object]],
    failure: BaseException,
    once: bool,
) -> None:
    for number in itertools.count(1):
        directory = tmp_path / str(number)
        action = operation(directory)
        before = max(one.step for one in good(directory))
        try:
            with ends_at(number, failure, once=once):
                action()
        except Killed:
            pass
        except JobFailed as error:
            assert "No space left on device" in str(error)
        except LookupError:
            break
        assert max(one.step for one in good(directory)) >= before, listing(directory)
        seen = [(one.step, one.progress) for one in good(directory)]
        checkpoint_store.remove_interrupted(directory, "later")
        assert [(one.step, one.progress) for one in good(directory)] == seen
        assert [name for name in listing(directory) if name.startswith(".")] == []
        assert len(listing(directory)) == len(seen), "half of one has a name"
        save(directory, before + 1)
        assert checkpoint_store.prune_checkpoints(directory, 1)
        assert steps(directory) == [before + 1]
    assert number > 5


# -- damaged ----------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_verify_finds_any_flipped_bit(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = save(Path(name), 5)
        file = data.draw(st.sampled_from(sorted(FILES)))
        content = bytearray(FILES[file])
        bit = data.draw(st.integers(0, len(content) * 8 - 1))
        content[bit // 8] ^= 1 << bit % 8
        (place / file).write_bytes(content)
        (found,) = checkpoint_store.list_checkpoints(Path(name))
        # The sizes are right, so only a full read finds the damage.
        assert found.complete
        assert checkpoint_store.verify_checkpoint(found) == [
            f"{file} is damaged: its sha256 is not the manifest's"
        ]
        assert (
            checkpoint_store.verify_checkpoint(found, [one for one in FILES if one != file]) == []
        )


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda file: file.unlink(), "__0_0.distcp is missing"),
        (lambda file: os.truncate(file, 999), "__0_0.distcp has 999 bytes instead of 1000"),
        (lambda file: os.truncate(file, 1001), "__0_0.distcp has 1001 bytes instead of 1000"),
        (lambda file: (file.unlink(), file.mkdir()), "__0_0.distcp is not a plain file"),
        (lambda file: (file.unlink(), os.mkfifo(file)), "__0_0.distcp is not a plain file"),
        (lambda file: (file.unlink(), file.symlink_to("x")), "__0_0.distcp is not a plain file"),
    ],
)
def test_damaged_file_makes_checkpoint_incomplete(
    tmp_path: Path, spoil: Callable[[Path], object], words: str
) -> None:
    place = save(tmp_path, 5)
    save(tmp_path, 4)
    spoil(place / "__0_0.distcp")
    newest, whole = checkpoint_store.list_checkpoints(tmp_path)
    assert (newest.complete, newest.problem) == (False, words)
    assert checkpoint_store.verify_checkpoint(newest) == [words]
    assert checkpoint_store.verify_checkpoint(newest, ["__1_0.distcp"]) == []
    assert whole.complete


RECORD = {"size": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"format": 2}, "manifest.json has format 2; this version reads 1"),
        ({"format": None}, "manifest.json has format None"),
        ({"step": 6}, "manifest.json belongs to step 6"),
        (
            {"step": "5"},
            "manifest.json cannot be read: Manifest.step must be a whole number, not '5'",
        ),
        ({"step": True}, "Manifest.step must be a whole number, not True"),
        ({"world": -1}, "Manifest.world must be a count, not -1"),
        ({"world": None}, "Manifest.world must be a whole number, not None"),
        ({"created": "now"}, "Manifest.created must be a number, not 'now'"),
        ({"created": float("nan")}, "Manifest.created must be a number, not nan"),
        ({"created": 10**400}, "Manifest.created must be a number"),
        ({"files": None}, "Manifest.files must hold keys"),
        ({"files": {}}, "manifest.json is invalid: it lists no files"),
        ({"files": []}, "Manifest.files must hold keys"),
        ({"files": {"a": None}}, "Manifest.files.a must hold keys"),
        ({"files": {"a\nb": {}}}, r"Manifest.files.a\nb is incomplete"),
        (
            {"files": {"a": {**RECORD, "sha256": "0" * 63}}},
            "Manifest.files.a.sha256 must be a checksum",
        ),
        (
            {"files": {"a": {**RECORD, "size": "1"}}},
            "a.size must be a whole number, not '1'",
        ),
        (
            {"files": {"a": {**RECORD, "size": 1.5}}},
            "a.size must be a whole number, not 1.5",
        ),
        ({"files": {"../a": RECORD}}, "manifest.json is invalid: '../a' is not"),
        ({"files": {"/etc/passwd": RECORD}}, "manifest.json is invalid"),
        ({"files": {"a\0": RECORD}}, "manifest.json is invalid"),
        ({"files": {"\ud800": RECORD}}, "manifest.json is invalid"),
        ({"files": {"x" * 300: RECORD}}, "cannot be read: File name too long"),
    ],
    ids=str,
)
def test_invalid_manifest_makes_checkpoint_incomplete(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    save(tmp_path, 4)
    change(save(tmp_path, 5), **fields)
    wrong, whole = checkpoint_store.list_checkpoints(tmp_path)
    assert (wrong.step, wrong.complete) == (5, False)
    assert words in wrong.problem
    assert any(words in problem for problem in checkpoint_store.verify_checkpoint(wrong))
    assert whole.complete
    checkpoint_store.prune_checkpoints(tmp_path, 1)
    assert steps(tmp_path) == [5, 4]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "manifest.json cannot be read: not JSON"),
        (b'{"format": 1, "st', "manifest.json cannot be read: not JSON"),
        (b"\xff\xfe\0", "manifest.json cannot be read: not JSON"),
        (b"9" * 5000, "manifest.json cannot be read: not JSON"),
        (b"[" * 100_000, "manifest.json "),
        (b"[]", "manifest.json cannot be read: not a JSON object"),
        (b'{"code": "an experiment\'s"}', "manifest.json is not the manifest of a checkpoint"),
        (None, "there is no manifest.json"),
    ],
)
def test_unreadable_manifest_is_a_problem(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    path = save(tmp_path, 5) / "manifest.json"
    path.unlink() if content is None else path.write_bytes(content)
    (found,) = checkpoint_store.list_checkpoints(tmp_path)
    assert words in found.problem
    assert (
        checkpoint_store.verify_checkpoint(found)
        == [found.problem]
        == checkpoint_store.verify_checkpoint(found, [])
    )
    assert not found.files


@pytest.mark.parametrize("kind", ["directory", "fifo", "link"])
def test_manifest_that_is_no_plain_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = save(tmp_path, 5) / "manifest.json"
    kept = path.rename(tmp_path / "kept")
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(kept)
    (found,) = checkpoint_store.list_checkpoints(tmp_path)
    assert found.problem == "manifest.json is not a plain file"


# -- finding ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "step_5",
        "step_000000005",
        # These are digits but not ASCII digits.
        "step_\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0665",
        "step_" + "9" * 19,
        "step_00000005\n",
        "step_00000005.bak",
        "STEP_00000005",
        ".step_00000005.partial",
        ".step_00000005.a.other",
        "latest",
        "lost+found",
    ],
)
def test_foreign_directories_are_left_alone(tmp_path: Path, name: str) -> None:
    save(tmp_path, 7)
    save(tmp_path, 6).rename(tmp_path / name)
    assert steps(tmp_path) == [7]
    assert checkpoint_store.prune_checkpoints(tmp_path, 1) == []
    checkpoint_store.remove_interrupted(tmp_path, "")
    assert name in listing(tmp_path)


@pytest.mark.parametrize("name", ["step_00000005", ".step_00000005.a.gone", "latest"])
def test_links_are_never_followed(tmp_path: Path, name: str) -> None:
    elsewhere = save(tmp_path / "elsewhere", 5)
    directory = tmp_path / "checkpoints"
    save(directory, 7)
    (directory / name).symlink_to(elsewhere)
    assert steps(directory) == [7]
    assert checkpoint_store.prune_checkpoints(directory, 1) == []
    checkpoint_store.remove_interrupted(directory, "")
    assert (directory / name).is_symlink()
    assert len(good(tmp_path / "elsewhere")) == 1


@pytest.mark.parametrize("name", ["a b", 'it\'s "so"', "a\nb", "$(reboot)", "ü\udcff", "-rf"])
def test_odd_file_names_are_handled(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name
    save(directory, 5, {name: b"content", ".metadata": b""})
    save(directory, 6, {name: b"content"})
    assert len(good(directory)) == 2
    (directory / "step_00000006" / name).unlink()
    assert checkpoint_store.list_checkpoints(directory)[0].problem.isprintable()
    assert [one.step for one in checkpoint_store.resolve_checkpoints(name, tmp_path)] == [6, 5]
    (directory / "step_00000006" / name).write_bytes(b"content")
    assert checkpoint_store.prune_checkpoints(directory, 1) == [directory / "step_00000005"]
    assert len(good(directory)) == 1


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EIO])
def test_unreadable_directory_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It is never "no checkpoints": a run from step 0 would lose the training so far."""

    def refuse(path: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UsageError, match=os.strerror(number)):
        checkpoint_store.list_checkpoints(tmp_path)


def experiment(root: Path, name: str, *saved: int) -> Path:
    place = root / name
    place.mkdir(parents=True)
    (place / "job.json").write_text("{}")
    (place / "manifest.json").write_text('{"code": {}, "nodes": []}')
    for step in saved:
        save(place / "outputs" / "checkpoints", step)
    return place


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    experiment(tmp_path / "experiments", "run_20260101_000000", 10, 20)
    experiment(tmp_path / "experiments", "run_20260102_000000", 30)
    experiment(tmp_path / "experiments", "run_20260103_000000")
    save(tmp_path / "elsewhere", 40)
    (tmp_path / "best").symlink_to(tmp_path / "elsewhere" / "step_00000040")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, [30]),
        ("run_20260101_000000", [20, 10]),
        ("experiments/run_20260101_000000", [20, 10]),
        ("experiments/run_20260101_000000/", [20, 10]),
        ("run_20260101_000000/outputs/checkpoints", [20, 10]),
        ("run_20260101_000000/outputs/checkpoints/step_00000010", [10]),
        ("elsewhere", [40]),
        ("elsewhere/step_00000040", [40]),
        ("best", [40]),
    ],
)
def test_resolve_accepts_names_and_paths(root: Path, text: str | None, expected: list[int]) -> None:
    found = checkpoint_store.resolve_checkpoints(text, Path("experiments"))
    assert [one.step for one in found] == expected
    assert all(one.path.is_absolute() for one in found)


def test_resolve_orders_by_time_saved(tmp_path: Path) -> None:
    for when, step in ((100.0, 14), (200.0, 2), (300.0, 4)):
        save(tmp_path / "mine", step, created=when)
    resolved = checkpoint_store.resolve_checkpoints(str(tmp_path / "mine"), tmp_path)
    assert [checkpoint.step for checkpoint in resolved] == [4, 2, 14]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run_20260101_00000", "did you mean 'run_2026010"),
        ("run_20260103_000000", "looked in .*/run_20260103_000000/outputs/checkpoints"),
        ("elsewhere/step_00000041", "there is no checkpoint in 'elsewhere/step_00000041'"),
        ("a\nb", r"'a\\nb'"),
        ("\0", "cannot be read"),
        ("x" * 5000, "File name too long"),
    ],
)
def test_resolve_rejects_unknown_checkpoint(root: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as error:
        checkpoint_store.resolve_checkpoints(text)
    assert f"did you mean {text!r}" not in str(error.value)


# -- removing ---------------------------------------------------------------------------------


def make(directory: Path, kinds: str) -> None:
    """c: complete, t: truncated, n: without a manifest; the newest first."""
    for step, kind in enumerate(reversed(kinds), 1):
        place = save(directory, step)
        if kind == "t":
            os.truncate(place / "__0_0.distcp", 10)
        elif kind == "n":
            (place / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("kinds", "keep", "left"),
    [
        ("ccc", 3, [3, 2, 1]),
        ("cccc", 3, [4, 3, 2]),
        ("ccc", 1, [3]),
        # The last checkpoint is never pruned.
        ("ccc", 0, [3]),
        # The only whole one is kept, and newer ones are.
        ("ttc", 1, [3, 2, 1]),
        ("tccc", 1, [4, 3]),
        ("ctcc", 2, [4, 3, 2]),
        ("ctt", 1, [3]),
        # A directory without a manifest may be another program's.
        ("cn", 1, [2, 1]),
        ("ttt", 1, [3, 2, 1]),
        ("", 1, []),
    ],
)
def test_prune_keeps_newest(tmp_path: Path, kinds: str, keep: int, left: list[int]) -> None:
    make(tmp_path, kinds)
    before = steps(tmp_path)
    gone = checkpoint_store.prune_checkpoints(tmp_path, keep)
    assert steps(tmp_path) == left
    assert gone == [
        checkpoint_store.final_path(tmp_path, s) for s in sorted(set(before) - set(left))
    ]
    assert len(listing(tmp_path)) == len(left)


@pytest.mark.parametrize(("keep", "left"), [(1, [15]), (2, [30, 15]), (3, [30, 20, 15])])
def test_prune_keeps_checkpoints_saved_after_going_back(
    tmp_path: Path, keep: int, left: list[int]
) -> None:
    for when, step in enumerate((10, 20, 30, 15)):
        save(tmp_path, step, created=100.0 + when)
    checkpoint_store.prune_checkpoints(tmp_path, keep)
    assert steps(tmp_path) == left


def test_prune_keeps_checkpoints_of_other_run(tmp_path: Path) -> None:
    for step in range(1, 7):
        save(tmp_path, step, progress={"run": step % 2})
    pruned = checkpoint_store.prune_checkpoints(
        tmp_path, 1, lambda found: found.progress["run"] == 1
    )
    assert [path.name for path in pruned] == ["step_00000001", "step_00000003"]
    assert [found.step for found in checkpoint_store.list_checkpoints(tmp_path)] == [6, 5, 4, 2]


def test_clean_removes_partial_checkpoints(tmp_path: Path) -> None:
    for token in ("mine", "earlier", "earlier.mine"):
        write(tmp_path, 5, token=token)
    save(tmp_path, 3)
    (tmp_path / ".step_00000004.abc.gone").mkdir()
    (tmp_path / ".seen_mine_0").touch()
    assert steps(tmp_path) == [3]
    checkpoint_store.remove_interrupted(tmp_path, "mine")
    assert listing(tmp_path) == [".seen_mine_0", ".step_00000005.mine.partial", "step_00000003"]
    checkpoint_store.remove_interrupted(tmp_path, "")
    assert listing(tmp_path) == [".seen_mine_0", "step_00000003"]
