"""A record counts if it is ours alone, and decides what runs only where this login launched it."""

import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.common import files
from orchestrator.common.errors import UsageError
from orchestrator.config.launch import Where
from orchestrator.head.follow.streams.node_logs import AppendOnly
from orchestrator.records import experiments, trust
from orchestrator.records.experiment import Experiment, Untrusted
from orchestrator.records.experiments import create_experiment, find_experiment, list_experiments
from tests.records.test_experiment import NODE, record

# No account has this user and group number.
OTHER = 12345
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Experiment]:
    made = create_experiment(tmp_path / "experiments", "run")
    made.write_signed(record())
    yield made


# -- modes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o777])
def test_files_are_private_under_any_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        made = create_experiment(tmp_path / "experiments", "run")
        made.write_signed(record())
        made.lock()
        made.unlock()
        for path in (made.log(NODE), made.ranks(NODE)):
            AppendOnly(path).close()
    finally:
        os.umask(before)
    found = [tmp_path / "experiments", *(tmp_path / "experiments").rglob("*"), trust.key_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o600, 0o700}
    assert len(found) == 11


# -- whose it is ------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [".", "job.json"])
def test_experiment_writable_by_others_is_refused(launched: Experiment, which: str) -> None:
    root, path = launched.path.parent, launched.path
    assert [found.path for found in list_experiments(Where(experiments=root))] == [path]
    (path / which).chmod(0o777)
    assert list_experiments(Where(experiments=root)) == []
    assert find_experiment(Where(experiments=root), None) is None
    named = find_experiment(Where(experiments=root), path.name)
    assert named is not None
    with pytest.raises(Untrusted, match="may be written by everybody") as refused:
        named.read_record()
    assert f"chmod -R go-w {path}; or add --trust-record" in refused.value.fix
    assert [found.problem for found in experiments.untrusted_experiments(root)] == [
        refused.value.problem
    ]
    trusted = find_experiment(Where(experiments=root, trust_record=True), None)
    assert trusted is not None
    assert trusted.read_record() == record()


@root_only
@pytest.mark.parametrize("which", [".", "job.json"])
def test_experiment_of_other_user_is_refused(launched: Experiment, which: str) -> None:
    os.chown(launched.path / which, OTHER, OTHER)
    assert list_experiments(Where(experiments=launched.path.parent)) == []
    with pytest.raises(Untrusted, match=f"belongs to user {OTHER}") as refused:
        launched.read_record()
    assert refused.value.fix.startswith("add --trust-record")


@root_only
def test_group_write_is_accepted_for_private_group(launched: Experiment) -> None:
    launched.path.chmod(0o770)
    assert launched.read_record() == record()  # root's group
    os.chown(launched.path, 0, OTHER)
    with pytest.raises(Untrusted, match=f"may be written by group {OTHER}"):
        launched.read_record()


def test_record_that_is_a_link_is_refused(launched: Experiment, tmp_path: Path) -> None:
    (launched.path / "job.json").rename(tmp_path / "job.json")
    (launched.path / "job.json").symlink_to(tmp_path / "job.json")
    assert list_experiments(Where(experiments=launched.path.parent)) == []
    with pytest.raises(UsageError, match="is not the record of a job"):
        launched.read_record()


def test_signature_decides_on_disk_without_modes(tmp_path: Path) -> None:
    """CIFS shows 0777 for all, also for what was just made 0700: then the signature decides."""
    made = create_experiment(tmp_path / "experiments", "run")
    made.path.chmod(0o777)
    # At its launch no other user knew of the directory.
    made.write_signed(record())
    assert made.read_record() == record()
    assert [found.path for found in list_experiments(Where(experiments=made.path.parent))] == [
        made.path
    ]
    made.write_record(record(ssh_config="/tmp/theirs"))
    with pytest.raises(Untrusted):
        made.read_record()


# -- whose orders -----------------------------------------------------------------------------


def test_own_record_is_accepted_after_updates(launched: Experiment) -> None:
    launched.check_launched(launched.read_record())
    later = record(state="lost", nodes=[replace(NODE, state="ended"), record().nodes[1]])
    launched.write_record(later)  # a head writes how it goes
    launched.check_launched(launched.read_record())


@pytest.mark.parametrize(
    "changed",
    [
        {"ssh_config": "/tmp/ssh_config"},
        {"job": "another"},
        {"part_of": 2},
        {"nodes": [replace(NODE, python="/tmp/python"), record().nodes[1]]},
        {"nodes": [replace(NODE, host="evil"), record().nodes[1]]},
        {"nodes": [NODE]},
    ],
)
def test_changed_record_is_refused(launched: Experiment, changed: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="was not launched by this login"):
        launched.check_launched(record(**changed))


def test_other_login_has_other_key(
    launched: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "another"))
    assert not launched.is_launched_here(record())
    trust.make_key()
    assert not launched.is_launched_here(record())


def test_readable_key_is_replaced(launched: Experiment) -> None:
    old = trust.key_file().read_bytes()
    trust.key_file().chmod(0o640)
    assert not launched.is_launched_here(record())
    launched.write_signed(record())
    assert trust.key_file().read_bytes() != old
    assert launched.is_launched_here(record())


def test_concurrent_launches_share_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "new"))
    replace, faster = files.replace_file, list[bytes | None]()

    def after_another(path: Path, data: bytes) -> None:
        monkeypatch.setattr(files, "replace_file", replace)
        faster.append(trust.make_key())
        replace(path, data)

    monkeypatch.setattr(files, "replace_file", after_another)
    assert trust.make_key() == faster[0] == trust.read_key()


# -- writing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["link", "dangling", "second name", "pipe", "directory is a link"])
def test_log_is_not_written_through_link(launched: Experiment, tmp_path: Path, kind: str) -> None:
    keys, log = tmp_path / "authorized_keys", launched.log(NODE)
    keys.write_text("mine\n")
    if kind == "link":
        log.symlink_to(keys)
    elif kind == "dangling":
        log.symlink_to(tmp_path / "new")
    elif kind == "second name":
        log.hardlink_to(keys)
    elif kind == "pipe":
        os.mkfifo(log)
    else:
        launched.logs.rmdir()
        (tmp_path / log.name).write_text("")
        launched.logs.symlink_to(tmp_path)
    with pytest.raises(UsageError, match="cannot be written"):
        AppendOnly(log).append(memoryview(b"theirs\n"))
    assert keys.read_text() == "mine\n"
    assert not (tmp_path / "new").exists()


def test_lock_is_a_plain_file(launched: Experiment, tmp_path: Path) -> None:
    head = launched.path / ".head"
    head.symlink_to(tmp_path / "new")
    with pytest.raises(UsageError, match="cannot be followed from here"):
        launched.lock()
    assert not (tmp_path / "new").exists()
    head.unlink()
    os.mkfifo(head)
    assert not launched.followed


@pytest.mark.parametrize("address", ["../../x", "a/b", "\x1b]0;", "..", "10.0.0.1\n"])
def test_log_path_stays_in_its_directory(address: str) -> None:
    path = Experiment(Path("/e")).log(replace(NODE, address=address))
    assert path.parent == Path("/e/logs")
    assert path.name.isprintable()


@root_only
def test_root_leaves_files_to_owner(launched: Experiment) -> None:
    for path in (launched.path, launched.logs):
        os.chown(path, OTHER, OTHER)
    launched.write_record(record())
    AppendOnly(launched.log(NODE)).close()
    launched.lock()
    launched.unlock()
    for path in (launched.path / "job.json", launched.log(NODE), launched.path / ".head"):
        assert (path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == (OTHER, 0o600)
