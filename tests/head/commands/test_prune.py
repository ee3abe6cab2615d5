"""`orchestrator prune`: how experiments go; without nodes."""

import dataclasses
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.common import files
from orchestrator.config.launch import Where
from orchestrator.head.prune import removal as removals
from orchestrator.head.prune.removal import NotRemovable, PruneEntry, Removal
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord
from tests.records.test_experiment import as_root, locked_by_a_reader
from tests.typed import typed as typed_in

ORCHESTRATOR = str(Path(sys.executable).parent / "orchestrator")
NODE = NodeRecord(0, "10.9.9.9", "10.9.9.9", None, None, "10.9.9.9", "python3", 0, 1)
RECORD = JobRecord("job-1", "experiments/x", "done", ["master_launch"], [], 1000.0)
Typed = Callable[..., tuple[int, str, str]]


# -- on a disk --------------------------------------------------------------------------------


def made(root: Path, name: str, state: str = "done", **fields: Any) -> Path:
    """An experiment as a launch leaves it."""
    path = root / name
    (path / "outputs/checkpoints/step_00000010").mkdir(parents=True)
    (path / "logs").mkdir()
    (path / "outputs/checkpoints/step_00000010/data").write_bytes(b"x" * 50_000)
    (path / "logs/node_0_10.9.9.9.txt").write_text("hello\n")
    record = dataclasses.replace(RECORD, job=f"job-{len(names(root))}", state=state, **fields)
    Experiment(path).write_signed(record)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "experiments"
    for day in (1, 2, 3):
        path.mkdir(exist_ok=True)
        made(path, f"m_2026010{day}_000000")
    return path


def type_it(root: Path, *words: str) -> tuple[int, str, str]:
    return typed_in(["prune", *words], root.parent)


@pytest.fixture
def typed(root: Path) -> Typed:
    return lambda *words: type_it(root, *words)


def without_rights(root: Path, *words: str) -> tuple[int, str]:
    """Run the command as a user without rights to other users' files."""
    done = subprocess.run(
        ["setpriv", f"--bounding-set={OTHERS_FILES}", ORCHESTRATOR, "prune", *words],
        cwd=root.parent,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def days(root: Path) -> str:
    return "".join(name[9] for name in names(root) if name.startswith("m_2026010"))


def test_prune_refuses_to_ask_without_terminal(root: Path, typed: Typed) -> None:
    code, out, err = typed("--keep", "1")
    assert code == 2 and "no terminal to ask on" in err and "--yes" in err
    lines = out.splitlines()
    assert lines[0].split() == ["experiment", "state", "when", "size"]
    assert lines[1].split()[:4] == ["m_20260102_000000", "done", "2026-01-02", "00:00"]
    assert lines[3].startswith("2 experiments, ") and days(root) == "123"


def test_yes_removes_and_reports_freed_space(root: Path, typed: Typed) -> None:
    code, out, err = typed("--keep", "1", "--yes")
    assert (code, err) == (0, "") and names(root) == ["m_20260103_000000"]
    assert "removed 2 experiments, 1" in out and " kB freed" in out
    code, out, _ = typed("--keep", "1")
    assert (code, out) == (0, f"nothing to remove: 1 experiment in {root}\n")


def test_dry_run_changes_nothing(root: Path, typed: Typed) -> None:
    before = snapshot(root)
    code, out, _ = typed("--keep", "0", "--dry-run")
    assert code == 0 and out.count("m_2026") == 3
    code, out, _ = typed("--keep", "0", "--dry-run", "--json")
    assert {one["action"] for one in json.loads(out)["experiments"]} == {"would be removed"}
    assert snapshot(root) == before


def test_prune_handles_missing_or_invalid_directory(tmp_path: Path) -> None:
    root = tmp_path / "experiments"
    assert type_it(root, "--keep", "1") == (
        0, "nothing to remove: there is no directory experiments\n", ""
    )  # fmt: skip
    root.write_text("")
    code, _, err = type_it(root, "--keep", "1")
    assert code == 2 and "Not a directory" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "say how many experiments to keep"),
        (["--keep", "-1"], "-1"),
        (["--keep", "x"], "not a valid integer"),
        (["--keep", "1", "--older-than", "3dd"], "there is no unit 'dd'; did you mean 'd'?"),
        (["--keep", "1", "name"], "unexpected extra argument"),
        (["--pin", "m_20260101_000000"], "--pin was removed: touch experiments/NAME/.pin"),
    ],
)
def test_prune_refuses_invalid_options(
    root: Path, typed: Typed, words: list[str], said: str
) -> None:
    before = snapshot(root)
    code, out, err = typed(*words)
    assert (code, out) == (2, "") and said in err
    assert snapshot(root) == before


def test_json_lists_every_experiment(root: Path, typed: Typed) -> None:
    (root / ".gitkeep").touch()
    code, out, _ = typed("--keep", "2", "--yes", "--json")
    told = json.loads(out)
    assert code == 0
    assert [one["action"] for one in told["experiments"]] == ["kept", "kept", "removed"]
    assert told["experiments"][0]["reason"] == "among the newest 2"
    assert told["freed"] == told["experiments"][2]["size"] > 50_000
    assert told["not_ours"][0]["name"] == ".gitkeep"


@pytest.mark.parametrize(
    ("answer", "left", "code"),
    [("y\n", "3", 0), ("n\n", "123", 130), ("\n", "123", 130), ("\x04", "123", 130)],
)
def test_prune_asks_on_terminal(root: Path, answer: str, left: str, code: int) -> None:
    leader, follower = pty.openpty()
    running = subprocess.Popen(
        [ORCHESTRATOR, "prune", "--keep", "1"],
        cwd=root.parent,
        stdin=follower,
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    seen = b""
    while b"[y/N]" not in seen:
        seen += os.read(leader, 1000)
    os.write(leader, answer.encode())
    assert running.wait(20) == code
    os.close(leader)
    assert days(root) == left and seen.count(b"m_2026") == 2


# -- pins -------------------------------------------------------------------------------------


def test_pinned_experiment_is_kept(root: Path, typed: Typed) -> None:
    pin = root / "m_20260101_000000/.pin"
    pin.touch()
    told = json.loads(typed("--keep", "0", "--yes", "--json")[1])
    assert [one["pinned"] for one in told["experiments"]] == [False, False, True]
    assert days(root) == "1"
    pin.unlink()
    assert typed("--keep", "0", "--yes")[0] == 0 and days(root) == ""


@pytest.fixture
def removal(root: Path) -> Iterator[Removal]:
    with files.open_directory(root) as fd:
        yield Removal(fd, root)


def entry_of(removal: Removal, name: str = "m_20260101_000000") -> PruneEntry:
    return next(
        one for one in removals.scan_experiments(removal.root, Where())[0] if one.name == name
    )


def test_hold_refuses_experiment_pinned_or_replaced_during_question(
    root: Path, removal: Removal
) -> None:
    one = entry_of(removal)
    (root / one.name / ".pin").touch()
    with pytest.raises(NotRemovable, match="just been pinned"), removal.hold(one):
        pass
    other = entry_of(removal, "m_20260102_000000")
    other.identity = one.identity
    with pytest.raises(NotRemovable, match="replaced a moment ago"), removal.hold(other):
        pass
    assert days(root) == "123"


# -- what must not be touched -----------------------------------------------------------------


def snapshot(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for where, inner, others in os.walk(path):
        for name in inner + others:
            one = Path(where, name)
            key = str(one.relative_to(path))
            if one.is_symlink():
                told[key] = one.readlink()
            elif one.is_file():
                told[key] = one.read_bytes()
            else:
                told[key] = "directory"
    return told


def test_prune_follows_no_symlink(tmp_path: Path, root: Path, typed: Typed) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    made(outside, "m_20260101_000000")
    (outside / "file").write_text("precious")
    before = snapshot(outside)
    one = root / "m_20260101_000000"
    (one / "outputs/data").symlink_to(outside)
    (one / "outputs/file").symlink_to(outside / "file")
    (one / "outputs/nothing").symlink_to("/no/such/place")
    (one / "outputs/self").symlink_to(one)
    (root / "link_20250101_000000").symlink_to(outside / "m_20260101_000000")
    two = root / "m_20260102_000000"
    (two / ".head").symlink_to(outside / "file")
    three = made(root, "record_20250102_000000")
    (three / "job.json").unlink()
    (three / "job.json").symlink_to(outside / "m_20260101_000000/job.json")
    four = made(root, "logs_20250103_000000")
    (four / "logs/node_0_10.9.9.9.txt").unlink()
    (four / "logs").rmdir()
    (four / "logs").symlink_to(outside)
    (root / ".x_20250101_000000.gone-01234567").symlink_to(outside)
    # The directory itself may be a link, because the user named it.
    (root.parent / "root").symlink_to(root)
    code, out, _ = typed("--keep", "1", "--yes", "--experiments", "root")
    assert snapshot(outside) == before
    assert names(root) == [
        ".x_20250101_000000.gone-01234567",
        "link_20250101_000000",
        "m_20260102_000000",
        "m_20260103_000000",
        "record_20250102_000000",
    ]
    assert "NOT REMOVED: m_20260102_000000: Too many levels of symbolic links" in out and code == 1


def test_take_refuses_directory_replaced_by_link(
    tmp_path: Path, root: Path, removal: Removal
) -> None:
    outside = tmp_path / "outside"
    made(tmp_path, "outside")
    before = snapshot(outside)
    path = root / "m_20260101_000000"
    one = entry_of(removal)
    with removal.hold(one) as held:
        path.rename(tmp_path / "moved")
        path.symlink_to(outside)
        with pytest.raises(NotRemovable, match="something else has taken its name"):
            removal.take(one, *held)
    with pytest.raises(NotADirectoryError), removal.hold(one):
        pass
    assert snapshot(outside) == before and path.is_symlink()


NOT_OURS = (
    *(None, "", "{}", "[]", "null", "5", '{"job": 1}', "\xff", '{"nodes": ["x"]}', "[" * 100_000),
    '{"nodes": [{"index": "../..", "name": "", "host": "", "user": null, "port": null,'
    ' "address": "", "python": "", "first_rank": 0, "nproc": 1}], "job": "a", "experiment": "",'
    ' "state": "done", "command": [], "started": 0, "head": {}}',
)


def test_prune_keeps_directories_that_are_no_experiments(root: Path, typed: Typed) -> None:
    for number, text in enumerate(NOT_OURS):
        other = root / f"other{number}_20250101_000000"
        other.mkdir()
        (other / "thesis.tex").write_text("precious")
        if text is not None:
            (other / "job.json").write_bytes(text.encode("latin-1"))
    others = sorted(set(names(root)) - {f"m_2026010{day}_000000" for day in (1, 2, 3)})
    code, out, _ = typed("--keep", "0", "--yes", "--json")
    assert (code, names(root), len(others)) == (0, others, len(NOT_OURS))
    told = {one["name"]: one["reason"] for one in json.loads(out)["not_ours"]}
    assert sorted(told) == others and all(why.startswith("it") for why in told.values())


def test_prune_keeps_files_fifos_and_odd_records(root: Path, typed: Typed) -> None:
    os.mkfifo(root / "fifo_20250101_000000")
    (root / "file_20250101_000000").write_text("")
    odd = made(root, "odd_20250101_000000")
    (odd / "job.json").unlink()
    os.mkfifo(odd / "job.json")
    directory = made(root, "dir_20250101_000000")
    (directory / "job.json").unlink()
    (directory / "job.json").mkdir()
    made(root, "no time in the name")
    (root / ".hidden_20250101_000000").mkdir()
    (root / ".m_20250101_000000.gone-0123abcd").write_text("a file")
    before = [name for name in names(root) if not name.startswith("m_")]
    assert typed("--keep", "0", "--yes")[0] == 0 and names(root) == before


def test_prune_keeps_experiment_in_use(root: Path, typed: Typed) -> None:
    place = Experiment(root / "m_20260101_000000")
    assert place.lock() is None
    before = snapshot(place.path)
    for words in (["--dry-run"], ["--yes"]):
        code, out, _ = typed("--keep", "1", *words)
        assert code == 0
        assert f"kept: m_20260101_000000: it is in use by process {os.getpid()} on" in out
    assert snapshot(place.path) == before
    place.unlock()
    assert typed("--keep", "1", "--yes")[0] == 0 and days(root) == "3"


def test_prune_keeps_experiment_locked_during_question(root: Path, removal: Removal) -> None:
    found = removals.scan_experiments(removal.root, Where())[0]
    place = Experiment(root / "m_20260101_000000")
    assert place.lock() is None
    other = os.open(root / "m_20260102_000000", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    removal.go(found)
    place.unlock()
    os.close(other)
    assert days(root) == "12"
    assert [one.action for one in found] == [removals.REMOVED, removals.KEPT, removals.KEPT]
    assert found[1].reason == "another prune is removing it" and "in use" in found[2].reason


@as_root
def test_prune_ignores_lock_of_reader_without_write_permission(root: Path, typed: Typed) -> None:
    with locked_by_a_reader(root / "m_20260101_000000/.head"):
        code, out, _ = typed("--keep", "1", "--yes")
    assert code == 0 and "in use" not in out and days(root) == "3"


def test_prune_keeps_running_job_whose_node_does_not_answer(root: Path, typed: Typed) -> None:
    nodes = [dataclasses.replace(NODE, host="127.0.0.1", port=1, name="gpu 7")]
    for state in ("starting", "running", "something new"):
        made(root, f"{state}_20250101_000000", state, nodes=nodes)
    made(root, "lost_20250101_000000", "lost", nodes=nodes)
    code, out, _ = typed("--keep", "0", "--yes")
    assert code == 0
    assert names(root) == [f"{s}_20250101_000000" for s in ("running", "something new", "starting")]
    assert out.count("and gpu 7 cannot be asked: it refuses connections") == 3


@pytest.mark.slow
def test_prune_contacts_no_machines_of_foreign_record(
    root: Path, typed: Typed, tmp_path: Path
) -> None:
    """Such as one that came with a cloned repository: its ssh_config is a program to run."""
    seen = tmp_path / "seen"
    config = tmp_path / "ssh_config"
    config.write_text(f"Host *\n ProxyCommand sh -c 'touch {seen}; exit 1'\n")
    (root / "m_20260103_000000/.launched").rename(tmp_path / "signature")
    for name, state in (("cloned", "running"), ("over", "done")):
        path = made(root, f"{name}_20250101_000000", state, nodes=[NODE], ssh_config=str(config))
        (path / ".launched").unlink()
        (path / ".launched").symlink_to(tmp_path / "signature")
    for words in (["--dry-run"], ["--dry-run", "--on-nodes"], ["--yes"]):
        code, out, _ = typed("--keep", "3", *words)
        assert code == 0
        reason = "this login did not launch it: its nodes are not asked"
        assert f"kept: cloned_20250101_000000: {reason}" in out
        assert ("kept: over" in out) == ("--on-nodes" in words)
    # The other experiment is gone.
    assert names(root)[0] == "cloned_20250101_000000"
    typed("--keep", "3", "--dry-run", "--trust-record")
    assert seen.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_prune_keeps_what_others_own_or_may_write(root: Path, typed: Typed) -> None:
    os.chown(root / "m_20260101_000000", 12345, 12345)
    (root / "m_20260102_000000/job.json").chmod(0o666)
    code, out, _ = typed("--keep", "0", "--yes", "--json")
    told = {one["name"]: one["reason"] for one in json.loads(out)["not_ours"]}
    assert code == 0 and told["m_20260101_000000"].startswith("it belongs to user 12345")
    assert told["m_20260102_000000"].startswith("it may be written by everybody")
    assert days(root) == "12" and typed("--keep", "0", "--yes", "--trust-record")[0] == 0
    assert days(root) == ""


def test_prune_keeps_record_if_node_cannot_be_cleaned(root: Path, typed: Typed) -> None:
    nodes = [dataclasses.replace(NODE, host="127.0.0.1", port=1, name="gpu7")]
    made(root, "far_20250101_000000", nodes=nodes)
    code, out, _ = typed("--keep", "1", "--yes", "--on-nodes")
    assert code == 4
    assert names(root) == ["far_20250101_000000", "m_20260103_000000"]
    assert "NOT REMOVED: far_20250101_000000: on node gpu7: it refuses connections" in out
    assert typed("--keep", "1", "--yes")[0] == 0
    assert names(root) == ["m_20260103_000000"]


OTHERS_FILES = "-dac_override,-dac_read_search,-fowner"


@as_root
def test_prune_keeps_experiment_whole_if_part_is_read_only(root: Path) -> None:
    theirs = root / "m_20260101_000000/outputs/checkpoints"
    os.chown(theirs, 65534, 65534)
    theirs.chmod(0o755)
    before = snapshot(root / "m_20260101_000000")
    code, out = without_rights(root, "--keep", "1", "--yes")
    assert code == 1
    assert "NOT REMOVED: m_20260101_000000: outputs/checkpoints is read-only for us" in out
    assert names(root) == ["m_20260101_000000", "m_20260103_000000"]
    assert snapshot(root / "m_20260101_000000") == before
    told = json.loads(without_rights(root, "--keep", "1", "--dry-run", "--json")[1])
    assert told["experiments"][1]["action"] == "failed"


LATE_MOUNT = """
import os, subprocess, sys
from orchestrator.head.prune import removal
outside, point, when = sys.argv[1:]
def mount(*_):
    subprocess.run(["mount", "--bind", outside, point], check=True)
class Removal(removal.Removal):
    def go(self, entries, leftovers=()):
        mount() if when == "asked" else None
        super().go(entries, leftovers)
    def take(self, entry, *held):
        mount() if when == "held" else None
        super().take(entry, *held)
from orchestrator.head.commands import prune
prune.Removal = Removal
sys.argv[1:] = ["prune", "--keep", "2", "--yes"]
mount() if when == "early" else None
from orchestrator.entry import main
main()
"""


@as_root
@pytest.mark.parametrize("when", ["early", "asked", "held"])
def test_prune_keeps_experiment_with_mount_inside(root: Path, tmp_path: Path, when: str) -> None:
    outside = tmp_path / "a data set"
    outside.mkdir()
    (outside / "file").write_text("precious")
    point = root / "m_20260101_000000/outputs/a b"
    point.mkdir()
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", LATE_MOUNT, str(outside), str(point), when],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (outside / "file").read_text() == "precious"
    assert "mounted there" in done.stdout
    assert done.returncode == (0 if when == "asked" else 1)
    assert days(root) == ("23" if when == "held" else "123")


# -- names ------------------------------------------------------------------------------------

ODD = [
    "my run",
    "it's",
    'a"b',
    "new\nline",
    "-rf",
    "--yes",
    "$(id)",
    "a\\b",
    "tab\t",
    "é",
    "*",
    "a;b",
]


def test_prune_handles_odd_names(root: Path, typed: Typed) -> None:
    for name in ODD:
        made(root, f"{name}_20250101_000000")
    broken = os.fsdecode(b"\xff\xfe_20250101_000000")
    made(root, broken)
    pins = [f"{name}_20250101_000000" for name in ODD[:5]]
    for name in pins:
        (root / name / ".pin").touch()
    code, out, _ = typed("--keep", "3", "--yes")
    assert code == 0
    # Each line stays one line with any characters in it.
    assert len(out.splitlines()) == 1 + len(ODD) - 5 + 1 + 2
    assert set(names(root)) == {*pins, *(f"m_2026010{day}_000000" for day in (1, 2, 3))}
    for name in pins:
        (root / name / ".pin").unlink()
    told = json.loads(typed("--keep", "3", "--yes", "--json")[1])
    assert {one["name"] for one in told["experiments"][3:]} == set(pins)
    assert days(root) == "123"


# -- interrupted ------------------------------------------------------------------------------

# Forks a prune for each line: a new Python at each moment takes twenty times as long.
PRUNES = """
import json, os, sys
import orchestrator.cli.run, orchestrator.entry
from orchestrator.cli.main import cli
from orchestrator.head.commands import prune
def counted(real):
    def call(*args, **options):
        global left
        if left == 0:
            os.kill(os.getpid(), number)
        left -= 1
        return real(*args, **options)
    return call
def run(directory):
    os.chdir(directory)
    sys.argv = ["orchestrator", "prune", "--keep", "1", "--yes"]
    for name in ("rename", "unlink", "rmdir", "fsync", "scandir", "open"):
        setattr(os, name, counted(getattr(os, name)))
    with open(os.devnull, "w") as null:
        sys.stdout = sys.stderr = null
        orchestrator.entry.main()
for line in sys.stdin:
    directory, left, number = json.loads(line)
    child = os.fork()
    if not child:
        code = 255
        try:
            run(directory)
        except SystemExit as leaving:
            code = leaving.code or 0
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_interrupted_prune_leaves_each_experiment_whole_or_gone(tmp_path: Path) -> None:
    """`cut_short` is a prune that gets a signal before the n-th thing it does to the disk."""
    forking = subprocess.Popen(
        [sys.executable, "-c", PRUNES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert forking.stdin is not None and forking.stdout is not None
    orders, codes = forking.stdin, forking.stdout

    def cut_short(root: Path, after: int) -> int:
        print(json.dumps([str(root.parent), after, int(signal.SIGKILL)]), file=orders, flush=True)
        return int(codes.readline())

    whole: dict[str, Any] = {}
    states = set()
    for after in range(200):
        root = tmp_path / str(after) / "experiments"
        root.mkdir(parents=True)
        for day in (1, 2):
            made(root, f"m_2026010{day}_000000")
        code = cut_short(root, after)
        shown = [name for name in names(root) if not name.startswith(".")]
        hidden = [name for name in names(root) if name.startswith(".")]
        for name in shown:
            files = set(snapshot(root / name)) - {".head"}
            whole.setdefault(name, files)
            assert files == whole[name], f"half of {name} after {after}"
        states.add((len(shown), len(hidden)))
        assert cut_short(root, -1) == 0  # never
        assert names(root) == ["m_20260102_000000"], after
        if code == 0:
            break
        assert code == -9
    forking.communicate()
    assert code == 0 and after > 15
    assert states == {(2, 0), (1, 1), (1, 0)}


def test_prune_removes_leftovers_of_interrupted_prune_after_yes(root: Path, typed: Typed) -> None:
    gone = root / ".m_20250101_000000.gone-0123abcd"
    (root / "m_20260101_000000").rename(gone)
    code, out, _ = typed("--keep", "5")
    assert code == 2 and "left by a prune that was interrupted" in out and gone.exists()
    told = json.loads(typed("--keep", "5", "--yes", "--json")[1])
    assert told["left_over"][0]["action"] == "removed" and told["freed"] > 50_000
    assert days(root) == "23" and not gone.exists()
