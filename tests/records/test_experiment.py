import contextlib
import dataclasses
import json
import os
import re
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.config.launch import Where
from orchestrator.protocol.events import RankState
from orchestrator.protocol.message import encode_value
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord
from orchestrator.records.experiments import create_experiment, find_experiment, list_experiments
from orchestrator.records.outcome import Head, JobVerdict

NODE = NodeRecord(0, "bob@gpu01", "gpu01", "bob", None, "10.0.0.1", "/usr/bin/python3", 0, 2)


def record(**fields: object) -> JobRecord:
    made = JobRecord(
        job="multinode_20260101_000000-abc",
        experiment="/experiments/multinode_20260101_000000",
        state="running",
        command=["master_launch", "train.py", "a b"],
        nodes=[NODE, dataclasses.replace(NODE, index=1, ranks={2: RankState(state="ended")})],
        started=1000.0,
        head=Head("head", 1, 1000.0),
    )
    return dataclasses.replace(made, **fields)  # type: ignore[arg-type]


def made(root: Path, name: str, with_record: bool = True) -> Path:
    path = root / name
    path.mkdir(parents=True)
    if with_record:
        (path / "job.json").write_text("{}")
    return path


# -- creating ---------------------------------------------------------------------------------


def test_create_makes_experiment_directory(tmp_path: Path) -> None:
    place = create_experiment(tmp_path / "deep" / "experiments", "run")
    assert place.path.is_absolute()
    assert re.fullmatch(r"run_\d{8}_\d{6}", place.name)
    stamp = time.mktime(time.strptime(place.name[4:], "%Y%m%d_%H%M%S"))
    assert abs(stamp - time.time()) < 5
    assert sorted(path.name for path in place.path.iterdir()) == ["logs", "outputs"]
    ignored = (place.path.parent / ".gitignore").read_text()
    # Git ignores all of them.
    assert ignored.splitlines()[-1] == "*"
    # This directory is another user's.
    create_experiment(tmp_path, "run")
    assert not (tmp_path / ".gitignore").exists()


def test_concurrent_creates_get_distinct_names(tmp_path: Path) -> None:
    places: list[Experiment] = []
    threads = [
        threading.Thread(target=lambda: places.append(create_experiment(tmp_path, "run")))
        for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({place.path for place in places}) == 20


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", ".x", "a b", "é", "a\n", "x" * 101])
def test_create_refuses_invalid_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot name an experiment"):
        create_experiment(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_create_explains_unusable_root(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "inner"):
        with pytest.raises(UsageError, match="no experiment can be created") as failed:
            create_experiment(root, "run")
        assert "--experiments" in failed.value.fix


def test_discard_removes_empty_experiment(tmp_path: Path) -> None:
    create_experiment(tmp_path, "run").discard()
    assert list(tmp_path.iterdir()) == []


# -- the record -------------------------------------------------------------------------------


def test_record_round_trips(tmp_path: Path) -> None:
    place = Experiment(tmp_path)
    place.write_record(record())
    assert place.read_record() == record()
    place.write_record(record(state="done", exit_code=0, verdict=JobVerdict(kind="x")))
    assert place.read_record().state == "done"
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]


def test_record_of_later_version_is_read(tmp_path: Path) -> None:
    data = encode_value(record())
    data["later"] = data["nodes"][0]["later"] = 1
    (tmp_path / "job.json").write_text(json.dumps(data))
    assert Experiment(tmp_path).read_record() == record()


def test_missing_record_is_explained(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(UsageError, match=r"job\.json is not there: it was removed, or is no"):
            Experiment(path).read_record()


@pytest.mark.parametrize("text", ["", "{}", "[]", "5", '{"job": 1}', '{"nodes": [{}]}', "\xff"])
def test_invalid_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match="is not the record of a job"):
        Experiment(tmp_path).read_record()


def test_log_paths_are_derived_from_node() -> None:
    place = Experiment(Path("/e"))
    assert place.log(NODE) == Path("/e/logs/node_0_10.0.0.1.txt")
    assert place.ranks(NODE) == Path("/e/logs/node_0_10.0.0.1.ranks")
    v6 = dataclasses.replace(NODE, index=3, address="fe80::1")
    assert place.log(v6).name == "node_3_fe80--1.txt"
    assert place.ranks(v6).name == "node_3_fe80--1.ranks"


# -- one head at a time -----------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from orchestrator.records.experiment import Experiment
place = Experiment(Path(sys.argv[1]))
print(place.lock(), flush=True)
sys.stdin.read()
"""


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_lock_admits_one_head(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout and other.stdin
    assert other.stdout.readline() == b"None\n"
    place = Experiment(tmp_path)
    before = open_files()
    holder = place.lock()
    assert holder is not None
    assert (holder.pid, holder.host) == (other.pid, os.uname().nodename)
    assert abs(holder.since - time.time()) < 60
    assert open_files() == before
    # It ends with the process, however that ends.
    other.kill()
    other.wait()
    for file in (other.stdin, other.stdout):
        file.close()
    assert place.lock() is None
    mine = Experiment(tmp_path).lock()
    assert mine is not None and (mine.pid, mine.host) == (os.getpid(), os.uname().nodename)
    place.unlock()
    again = Experiment(tmp_path)
    assert again.lock() is None
    again.unlock()
    again.unlock()


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another login")


@contextlib.contextmanager
def locked_by_a_reader(path: Path) -> Iterator[None]:
    """Have a login that may only read a file hold its lock in the block."""
    path.touch(0o644)
    code = "import fcntl, os, sys; os.setuid(65534)\n"
    code += "fcntl.flock(0, fcntl.LOCK_EX); print(flush=True); sys.stdout.close()\n"
    code += "import time; time.sleep(600)"
    with path.open() as file:
        colleague = subprocess.Popen(
            [sys.executable, "-c", code], stdin=file, stdout=subprocess.PIPE
        )
    assert colleague.stdout is not None and colleague.stdout.readline() == b"\n"
    try:
        yield
    finally:
        colleague.kill()
        colleague.communicate()


@as_root
def test_reader_without_write_permission_blocks_no_lock(tmp_path: Path) -> None:
    one = made(tmp_path, "run_20260101_000000")
    with locked_by_a_reader(one / ".head"):
        owner, second = Experiment(one), Experiment(one)
        assert not owner.followed
        assert owner.lock() is None
        assert owner.followed and second.lock() is not None
        assert stat.S_IMODE((one / ".head").stat().st_mode) == 0o600
    with locked_by_a_reader(one / ".tracking"):
        assert owner.hold(".tracking") and not second.hold(".tracking")


def test_lock_is_not_inherited_by_children(tmp_path: Path) -> None:
    place = Experiment(tmp_path)
    assert place.lock() is None
    child = subprocess.Popen(["sleep", "1000"], close_fds=False)
    place.unlock()
    try:
        assert Experiment(tmp_path).lock() is None
    finally:
        child.kill()
        child.wait()


# -- finding ----------------------------------------------------------------------------------


def test_every_orders_by_time_in_name(tmp_path: Path) -> None:
    made(tmp_path, "z_20250101_000000")
    made(tmp_path, "multi_node_20260301_120001")
    made(tmp_path, "a_20260301_120000")
    made(tmp_path, "b_20240101_000000")
    made(tmp_path, "no_record_20270101_000000", with_record=False)
    made(tmp_path, "20270101_000000")
    made(tmp_path, "other")
    (tmp_path / "file_20270101_000000").write_text("")
    (tmp_path / "link_20270101_000000").symlink_to(tmp_path / "z_20250101_000000")
    (tmp_path / ".gitkeep").write_text("")
    assert [found.name for found in list_experiments(Where(experiments=tmp_path))] == [
        "b_20240101_000000",
        "z_20250101_000000",
        "a_20260301_120000",
        "multi_node_20260301_120001",
    ]
    assert list_experiments(Where(experiments=tmp_path / "none")) == []
    assert list_experiments(Where(experiments=tmp_path / "file_20270101_000000")) == []


def test_find_without_name_returns_newest(tmp_path: Path) -> None:
    assert find_experiment(Where(experiments=tmp_path), None) is None
    made(tmp_path, "a_20260101_000000")
    newest = made(tmp_path, "a_20260101_000001")
    found = find_experiment(Where(experiments=tmp_path), None)
    assert found is not None
    assert found.path == newest


def test_find_accepts_name_or_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "experiments"
    path = made(root, "a_20260101_000000")
    elsewhere = made(tmp_path, "copied")
    monkeypatch.chdir(tmp_path)
    for wanted in ("a_20260101_000000", "a_20260101_000000/", str(path),
                   "experiments/a_20260101_000000"):  # fmt: skip
        found = find_experiment(Where(), wanted)
        assert found is not None
        assert found.path == path
    found = find_experiment(Where(experiments=root), "copied")
    assert found is not None
    assert found.path == elsewhere
    for wanted in ("b", "a_20260101", ".", "experiments"):
        assert find_experiment(Where(experiments=root), wanted) is None


def test_known_suggests_where_experiment_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another directory, as in a second terminal, and by the name of its project."""

    def error(wanted: str | None) -> UsageError:
        with pytest.raises(UsageError) as raised:
            experiments.require_experiment(Where(), wanted)
        return raised.value

    made(tmp_path / "project" / "experiments", "run_20260102_000000")
    made(tmp_path / "project" / "experiments", "run_20260101_000000")
    monkeypatch.chdir(tmp_path)
    for wanted in (None, "run_20260102_000000"):
        assert str(tmp_path / "experiments") in error(wanted).what
        assert "name one by its path" in error(wanted).fix
    monkeypatch.chdir(tmp_path / "project")
    assert "did you mean 'run_20260101_000000'?" in error("run_20260101_00000").what
    # A prefix of a name is enough for a suggestion.
    assert "did you mean 'run_2" in error("run").what
    assert error("other").fix.startswith("the newest is run_2")
    with pytest.raises(UsageError, match="name of the experiment is empty"):
        # This is "$EXP" with EXP unset; it does not mean the newest.
        find_experiment(Where(), "")


# -- choosing a part of it --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "node", "rank", "problem"),
    [
        ([NODE], 0, 1, ""),
        ([NODE], 1, None, "--node 1: this job has nodes 0 to 0"),
        ([NODE], None, 2, "--rank 2: this job has ranks 0 to 1"),
        ([dataclasses.replace(NODE, index=1, first_rank=2)], 1, 3, ""),  # one machine's part
        ([dataclasses.replace(NODE, index=1, first_rank=2)], None, 0, "this job has ranks 2 to 3"),
        # The job waits in Slurm's queue.
        ([], 0, None, "--node 0: this job has no nodes yet"),
    ],
)
def test_check_choice_validates_node_and_rank(
    nodes: list[NodeRecord], node: int | None, rank: int | None, problem: str
) -> None:
    if problem:
        with pytest.raises(UsageError, match=problem):
            record(nodes=nodes).check_choice(node, rank, "--{} {}")
    else:
        record(nodes=nodes).check_choice(node, rank, "--{} {}")


def test_hold_admits_one_process(tmp_path: Path) -> None:
    assert Experiment(tmp_path).hold(".watch")
    assert not Experiment(tmp_path).hold(".watch")
    assert Experiment(tmp_path).hold(".tracking")
