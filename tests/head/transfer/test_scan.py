"""The working tree as the head reads it: what travels, and what it costs when nothing changed."""

import itertools
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from orchestrator.common import files
from orchestrator.common.errors import CheckFailed
from orchestrator.head.start import record
from orchestrator.head.transfer import scan as scanning
from orchestrator.head.transfer.listing import Rules, list_tree
from orchestrator.head.transfer.scan import Scan, Tree
from orchestrator.protocol.manifest import DIRECTORY, FILE, LINK

IDENTITY = ["-c", "user.name=n", "-c", "user.email=e@x", "-c", "protocol.file.allow=always"]
OLD = 1_500_000_000


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def git(directory: Path, *words: str) -> None:
    subprocess.run(
        ["git", "-C", str(directory), *IDENTITY, *words], check=True, capture_output=True
    )


def write(directory: Path, *names: str) -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def paths(directory: Path, **rules: Any) -> set[str]:
    listed, _ = list_tree(os.fsencode(directory), Rules(**rules))
    return set(map(os.fsdecode, listed))


def scan(directory: Path, **rules: Any) -> Tree:
    return Scan(os.fsencode(directory), Rules(**rules)).tree()


# -- what travels -----------------------------------------------------------------------------


def test_scan_follows_git(work: Path) -> None:
    git(work, "init", "-q")
    write(work, "a.py", "pkg/b.py", "gone.py", "ignored/big", "below/c.py")
    write(work, "experiments/old/job.json", "pkg/__pycache__/b.pyc", ".venv/bin/python")
    (work / ".gitignore").write_text("ignored\n*.log\n")
    git(work, "add", "-A")
    git(work, "commit", "-qm", "x")
    (work / "gone.py").unlink()
    write(work, "new.py", "new.log")
    write(work, ".orchestrator-copies-1.json", "pkg/.orchestrator-marker-1")
    write(work, ".orchestrator-arriving/x.pt")
    tree = scan(work, apart=(b"experiments",))
    names = {os.fsdecode(entry.path) for entry in tree.entries}
    assert names == {".gitignore", "a.py", "pkg/b.py", "below/c.py", "new.py"}
    assert paths(work / "below") == {"c.py"}
    assert "new.log" in paths(work, always=(b"new.log",))
    program = "experiments/old/job.json"
    assert program in paths(work, always=(program.encode(),), apart=(b"experiments",))
    assert {"ignored/big", "new.log"} <= paths(work, include=("ignored", "*.log"))
    assert not {"pkg/b.py", "a.py"} & paths(work, exclude=("pkg", "a*"))
    assert "below/c.py" not in paths(work, exclude=("below/*.py",))


def not_sent(names: str) -> str:
    first, _, others = names.partition(", ")
    sends = f"--set 'sync.include=[{first}]' sends {'the first' if others else 'it'}"
    return f"warning: not sent, because it is private: {names}; {sends}"


def test_scan_leaves_out_private_files_tracked_by_git(work: Path) -> None:
    git(work, "init", "-q")
    write(work, "a.py", ".aws/config", "sub/.cache/x", "sub/.cache/y", ".git-credentials")
    git(work, "add", "-A")
    tree = scan(work)
    assert [entry.path for entry in tree.entries] == [b"a.py"]
    assert tree.notes == (not_sent(".aws, .git-credentials, sub/.cache"),)
    tree = scan(work, include=(".aws",), exclude=(".git-credentials",))
    assert [entry.path for entry in tree.entries] == [b".aws/config", b"a.py"]
    assert tree.notes == (not_sent("sub/.cache"),)
    (work / ".gitignore").write_text(".*\n")
    git(work, "rm", "-rq", "--cached", ".")
    assert scan(work).notes == ()


PERSONAL = [
    *(".env", ".env.local", "conf/.envrc", "keys/id_rsa", "id_ed25519", "tls/server.pem", "me.p12"),
    *(".kube/config", ".docker/config.json", ".npmrc", ".pypirc", ".huggingface/token"),
    *("kaggle.json", ".config/gcloud/credentials.db", ".azure/x", ".ssh/config", ".netrc"),
    *("secrets.env", "conf/prod.env"),
]
NOT_PERSONAL = [
    ".env.example",
    "example.env",
    "id_mapping.py",
    "id_rsa.pub",
    "docker/config.json",
    "pem.py",
]


@pytest.mark.parametrize("with_git", [True, False])
def test_scan_leaves_out_keys_and_says_so(work: Path, *, with_git: bool) -> None:
    if with_git:
        git(work, "init", "-q")
    write(work, *PERSONAL, *NOT_PERSONAL)
    for name in PERSONAL:
        assert paths(work, include=(name,)) == {name, *NOT_PERSONAL}
    tree = scan(work)
    assert [os.fsdecode(entry.path) for entry in tree.entries if entry.kind == FILE] == sorted(
        NOT_PERSONAL
    )
    assert len(tree.notes) == 1
    assert "not sent" in tree.notes[0] and f"and {len(PERSONAL) - 10} more" in tree.notes[0]
    assert ".env.local" in tree.notes[0]
    (note,) = scan(work, include=("keys",), exclude=("*",)).notes
    # A named folder is sent without its keys.
    assert "keys/id_rsa" in note


def test_scan_includes_submodules_and_clones(work: Path, tmp_path: Path) -> None:
    for name in ("library", "work"):
        git(tmp_path / "work" if name == "work" else tmp_path, "init", "-q", *(
            ["library"] if name == "library" else []
        ))  # fmt: skip
    write(tmp_path / "library", "inside.py", "junk.o")
    (tmp_path / "library/.gitignore").write_text("*.o")
    git(tmp_path / "library", "add", "-A")
    git(tmp_path / "library", "commit", "-qm", "x")
    git(work, "submodule", "add", "-q", str(tmp_path / "library"), "sub")
    git(work, "clone", "-q", str(tmp_path / "library"), "other")
    write(work, "sub/new.py", "sub/more.o")
    assert {"sub/inside.py", "sub/new.py", "other/inside.py"} <= paths(work)
    assert "sub/more.o" not in paths(work)


def test_scan_runs_no_program_named_by_repository(work: Path, tmp_path: Path) -> None:
    """Neither the outer one nor one inside, such as an unpacked tarball with a .git in it."""
    (work / "inner").mkdir()
    for place in (work, work / "inner"):
        git(place, "init", "-q")
        git(place, "config", "core.fsmonitor", f"touch {tmp_path}/ran; false")
    scan(work)
    record.git_state(work)
    assert not (tmp_path / "ran").exists()


def test_scan_without_git_leaves_out_generated_directories(work: Path) -> None:
    write(work, "a.py", "data/x", "checkpoints/1", "b/__pycache__/c", ".venv/x", "node_modules/y")
    write(work, ".ssh/id_ed25519", ".cache/x")
    (work / "empty").mkdir()
    assert paths(work) == {"a.py", "data/x", "empty"}
    assert paths(work, include=("checkpoints",)) == {"a.py", "data/x", "empty", "checkpoints/1"}
    assert scan(work).notes == (not_sent(".ssh"),)


def test_scan_refuses_if_git_refuses(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its list what git ignores would go to the nodes, data and secrets too."""
    git(work, "init", "-q")
    write(work, "a.py")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(CheckFailed, match=r"(?s)dubious ownership.*safe.directory") as caught:
        scan(work)
    assert str(work) in caught.value.fix


def test_scan_of_ignored_directory_lists_it(work: Path) -> None:
    git(work, "init", "-q")
    (work / ".gitignore").write_text("inner\n")
    write(work, "inner/a.py")
    assert paths(work / "inner") == {"a.py"}


def test_cancelled_scan_stops(work: Path) -> None:
    """A launch typed in / must not walk through the whole machine."""
    write(work, *(f"{number}/a.py" for number in range(50)))
    calls: list[int] = []

    def over() -> bool:
        calls.append(1)
        return len(calls) > 3

    assert len(list_tree(os.fsencode(work), Rules(), over)[0]) <= 3
    given_up = Scan(os.fsencode(work), Rules())
    given_up.cancel()
    given_up.tree()
    assert given_up.ready(0) is None


@pytest.mark.parametrize("kind", ["git", "no git"])
def test_scan_accepts_any_name(work: Path, kind: str) -> None:
    if kind == "git":
        git(work, "init", "-q")
    names = [b"a\nb", b"\"q'", b"\xff\xfe", "\u00e9\u65e5".encode(), b"sp ace", b"-dash", b"\\x"]
    for name in names:
        (work / os.fsdecode(name)).write_bytes(name)
    assert sorted(entry.path for entry in scan(work).entries) == sorted(names)


def test_scan_keeps_kinds_and_modes(work: Path, tmp_path: Path) -> None:
    write(work, "run.sh", "read.py")
    (work / "run.sh").chmod(0o750)
    (work / "read.py").chmod(0o444)
    (work / "empty").mkdir()
    (work / "inner").symlink_to("read.py")
    (work / "out").symlink_to(tmp_path)
    os.mkfifo(work / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(work, os.O_RDONLY)
        # The path itself may be too long for a socket.
        server.bind(f"/proc/self/fd/{here}/sock")
        os.close(here)
        tree = scan(work)
    known = {os.fsdecode(entry.path): (entry.kind, entry.mode) for entry in tree.entries}
    assert known == {
        "run.sh": (FILE, 0o750),
        "read.py": (FILE, 0o444),
        "empty": (DIRECTORY, 0o755),
        "inner": (LINK, 0),
        "out": (LINK, 0),
    }
    assert set(tree.notes) == {
        "pipe does not travel: it is neither a file nor a link",
        "sock does not travel: it is neither a file nor a link",
        "links lead out of the tree: out",
    }


# -- what it costs, and what stops it -----------------------------------------------------------


def reads(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    seen: list[bytes] = []
    real = scanning.read_file

    def read(where: bytes, path: bytes, index: Any) -> Any:
        seen.append(path)
        return real(where, path, index)

    monkeypatch.setattr(scanning, "read_file", read)
    return seen


def test_scan_rereads_changed_files_alone(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(work, "a.py", "b.py", "new.py")
    monkeypatch.setattr(
        "orchestrator.head.transfer.scan.FRESH_NANOSECONDS", -(10**12)
    )  # none counts as fresh
    first = scan(work)
    seen = reads(monkeypatch)
    assert scan(work) == first
    assert seen == []
    for name in ("a.py", "b.py"):
        os.utime(work / name, (OLD, OLD))
    # The length and the time are the same as before.
    (work / "b.py").write_text("B.PY")
    os.utime(work / "b.py", (OLD, OLD))
    second = scan(work)
    assert set(seen) == {b"a.py", b"b.py"}
    assert second.digest != first.digest


def test_scan_rereads_fresh_file(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second edit within one tick of the file system's clock may look the same."""
    write(work, "a.py")
    monkeypatch.setattr("orchestrator.head.transfer.scan.FRESH_NANOSECONDS", 10**18)
    scan(work)
    seen = reads(monkeypatch)
    scan(work)
    assert seen == [b"a.py"]


def test_scan_refuses_file_that_changes(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(work, "log.txt")
    states = itertools.count()
    monkeypatch.setattr(files, "state_of", lambda _: next(states))
    with pytest.raises(CheckFailed, match=r"(?s)log.txt was changed while it was read.*exclude"):
        scan(work)


def test_scan_refuses_too_large_files(work: Path) -> None:
    write(work, "a.py")
    with (work / "weights.bin").open("wb") as file:
        file.truncate(3_000_000)
    with pytest.raises(CheckFailed, match=r"(?s)weights.bin has 3 MB.*sync.largest_file=3"):
        scan(work, largest_file=2)
    with pytest.raises(CheckFailed, match=r"(?s)has 3 MB; more than 2 MB.*sync.largest_tree=4"):
        scan(work, largest_tree=2)
    assert len(scan(work, largest_file=3, largest_tree=4).entries) == 2
    assert len(scan(work, largest_file=2, exclude=("*.bin",)).entries) == 1


def test_scan_refuses_unreadable_file(work: Path) -> None:
    write(work, "secret")
    (work / "secret").chmod(0)
    if os.geteuid() == 0:
        assert scan(work).entries[0].mode == 0o400
    else:
        with pytest.raises(CheckFailed, match="secret cannot be read: Permission denied"):
            scan(work)
