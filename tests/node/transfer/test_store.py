"""The node's store of code: contents that come whole or not at all, and snapshots made of them."""

import hashlib
import os
import shutil
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.server.session import Refusal, ServerSession
from orchestrator.node.transfer import checkout, job_files, outputs, snapshot
from orchestrator.node.transfer.checkout import CodeSession
from orchestrator.node.transfer.store import Store
from orchestrator.protocol import manifest
from orchestrator.protocol.events import Ended
from orchestrator.protocol.manifest import DIRECTORY, FILE, LINK, ManifestEntry
from orchestrator.protocol.requests.request import Request
from orchestrator.protocol.requests.transfer import (
    STORE,
    AskJobFiles,
    CheckedOut,
    CheckOut,
    Contents,
    FilePart,
    Offer,
    Outputs,
    ReadFile,
    RemoteDir,
)
from orchestrator.protocol.spec import Target
from tests.node.running import bare_spec, run_dir

CONTENTS = {
    b"a.py": b"print(1)\n",
    b"pkg/b.py": b"x = 2\n" * 1000,
    b"empty": b"",
    b"same": b"print(1)\n",
    b"new\nline \xff": b"odd",
}


def entry(path: bytes, content: bytes, mode: int = 0o644) -> ManifestEntry:
    return ManifestEntry(
        path, FILE, mode, len(content), hashlib.sha256(content).hexdigest().encode()
    )


ENTRIES = (
    *(entry(path, content) for path, content in sorted(CONTENTS.items())),
    ManifestEntry(b"void/inner", DIRECTORY, 0o755, 0, b""),
    ManifestEntry(b"way", LINK, 0, 0, b"pkg/b.py"),
)
LISTING = manifest.pack_entries(ENTRIES)
DIGEST = manifest.digest_of(LISTING)
ENDED = Ended(time=1.0, agent=0, why="", killed={}, left=(), ranks={})


@pytest.fixture
def store(home: Path) -> Store:
    store = Store()
    store.prepare()
    return store


def asked(session: ServerSession, request: Request[Any], data: bytes) -> Any:
    session.piece += zlib.compress(data)
    return session.answer(request)


ASKED = Outputs(job="job-1", part=0)


def send(own: CodeSession | None = None) -> int:
    """Send what is lacking, in a session of its own; return how many contents that were."""
    session = own.session if own is not None else ServerSession()
    lacking = asked(session, Offer(into=RemoteDir(kind=STORE)), LISTING)
    numbers = lacking.numbers
    parts = [(at, CONTENTS[ENTRIES[at].path]) for at in numbers]
    data = b"".join(FilePart(at, 0, len(content)).packed() + content for at, content in parts)
    written = asked(session, Contents(size=len(data)), data)
    assert written.failed == {}
    return len(numbers)


def check_out(session: CodeSession, name: str = "x", beside: str = "/nowhere") -> CheckedOut:
    target = Target(kind="auto", name="a.py")
    return session.check_out(
        CheckOut(tree=DIGEST, snapshot=name, title="u/w/my proj", beside=beside, target=target)
    )


def start(session: CodeSession, job: str, workdir: str) -> RunDir:
    run = run_dir(job, workdir=workdir)
    session.job_started(run, run.read_spec())
    return run


@pytest.fixture
def session(store: Store) -> CodeSession:
    """A session to which a head has sent all contents."""
    made = ServerSession().of(CodeSession)
    send(made)
    return made


@pytest.fixture(params=["copied", "linked"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small trees are copied, large ones linked."""
    if request.param == "linked":
        monkeypatch.setattr(snapshot, "COPIED_BYTES", -1)
    return str(request.param)


def test_tree_is_received_and_checked_out(store: Store, way: str) -> None:
    session = ServerSession().of(CodeSession)
    with pytest.raises(ValueError, match="was not offered"):
        check_out(session)
    # Two files have the same content.
    assert send(session) == 4
    checked = check_out(session)
    assert checked.own == ()
    assert checked.target == Target(kind="script", name="a.py")
    root = Path(checked.workdir)
    for path, content in CONTENTS.items():
        assert (root / os.fsdecode(path)).read_bytes() == content
    assert (root / "way").readlink() == Path("pkg/b.py")
    assert list((root / "void").iterdir()) == [root / "void/inner"]
    names = [Path(one.workdir).parents[2].name for one in (checked, check_out(session))]
    assert names == ["x-0", "x-1"], "a node that shares this disk asks for the same name"
    assert send(ServerSession().of(CodeSession)) == 0


def test_job_that_writes_into_its_sources_reaches_no_other_and_no_later_job(
    store: Store, session: CodeSession, way: str
) -> None:
    """A node that shares the home, another job that runs, and every job after them."""
    roots = [Path(check_out(session, name).workdir) for name in ("x", "y", "z")]
    for root in roots:
        with (root / "a.py").open("r+b") as file:
            file.write(b"PRINT")
        (root / "pkg/b.py").chmod(0o600)
    for root in roots:
        (root / "same").write_bytes(b"")
    assert [(root / "a.py").read_bytes() for root in roots] == [b"PRINT(1)\n"] * 3
    # Contents that a job was linked to are sent again.
    assert send(session) == (2 if way == "linked" else 0)
    root = Path(check_out(session, "later").workdir)
    for path, content in CONTENTS.items():
        assert (root / os.fsdecode(path)).read_bytes() == content


@pytest.mark.parametrize("how", ["longer", "other content", "other mode"])
def test_damaged_content_is_requested_again(
    store: Store, session: CodeSession, way: str, how: str
) -> None:
    (changed,) = (e for e in ENTRIES if e.path == b"a.py")
    path = Path(os.fsdecode(store.path_of(changed)))
    if how == "other mode":
        path.chmod(0o600)
    else:
        path.write_bytes(b"print(2)\n" * (2 if how == "longer" else 1))
    with pytest.raises(ValueError, match=r"a\.py has to come again"):
        check_out(session)
    assert not list(Path(os.fsdecode(store.snapshots)).iterdir())
    assert send(session) == 1
    assert Path(check_out(session).workdir, "a.py").read_bytes() == CONTENTS[b"a.py"]


def test_invalid_requests_are_refused(store: Store) -> None:
    session, into = ServerSession(), RemoteDir(kind=STORE)
    with pytest.raises(Refusal, match="not a list of files"):
        asked(session, Offer(into=into), LISTING[1:-1])
    nameless = manifest.pack_entries([ENTRIES[0]._replace(value=b"")])
    with pytest.raises(Refusal, match="without its checksum"):
        asked(session, Offer(into=into), nameless)
    part = FilePart(0, 0, 1).packed() + b"x"
    with pytest.raises(Refusal, match="was not lacking"):
        asked(session, Contents(size=len(part)), part)
    asked(session, Offer(into=into), LISTING)
    with pytest.raises(Refusal, match="more than 3 bytes"):
        asked(session, Contents(size=3), b"xxxxx")
    for name, title in (("../x", "t"), ("x", "../t"), ("x", ".."), ("x", ""), (".x", "t")):
        with pytest.raises(ValueError, match="not the name of a snapshot"):
            snapshot.make_snapshot(store, name, title, ENTRIES)


def test_store_writable_by_others_is_refused(store: Store) -> None:
    Path(os.fsdecode(store.objects)).chmod(0o777)
    with pytest.raises(ValueError, match="may be written by everybody"):
        ServerSession().of(CodeSession)


def test_inputs_of_node_are_linked_into_snapshot(
    store: Store, session: CodeSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New files stay in the snapshot, in inputs too; what is written in sync.outputs does not."""
    beside = tmp_path / "proj"
    own = ("data/x", "old.py", "oldpkg/__init__.py", ".git/x", "pkg/stale.py", "a.py")
    for name in (*own, "state.pt", "ck/old.pt", "pkg/corpus/x", ".venv/bin/python", "data/in/y"):
        path = beside / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    target = Target(kind="module", name="a")
    request = CheckOut(
        tree=DIGEST, snapshot="x-0", title="t", beside=str(beside), target=target,
        outputs=("runs/mine", "data/out"), inputs=("data", ".venv", "pkg/corpus", "pkg", "none"),
    )  # fmt: skip
    checked = session.check_out(request)
    root = Path(checked.workdir)
    assert checked.own == ("data", ".venv", "pkg/corpus")
    for name in ("state.pt", "ck/new.pt", "data/in/new.pt", "pkg/corpus/new.pt"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("of the job")
        assert not (beside / name).exists() or (beside / name).read_text() == name
    assert (root / "data/in/y").read_text() == "data/in/y"
    assert {str(path.relative_to(root)) for path in root.joinpath("data").rglob("*")} == {
        "data/x", "data/in", "data/in/y", "data/in/new.pt", "data/out",
    }  # fmt: skip
    assert (root / ".venv").is_symlink() and not (root / "pkg/stale.py").exists()
    for name in ("runs/mine/result", "data/out/result"):
        (root / name).write_text("r")
        assert (beside / name).read_text() == "r"
    monkeypatch.setattr(snapshot, "MOST_LINKS", 1)
    remark = " (over 1 files: what is written there stays there)"
    large = session.check_out(request.replace(outputs=("pkg/corpus",)))
    assert large.own == (f"data{remark}", ".venv")
    assert (beside / "data").samefile(Path(large.workdir, "data"))
    deeper = request.replace(snapshot="y-0", title="u/proj", outputs=("../outputs", "../../x"))
    root = Path(session.check_out(deeper).workdir)
    (root.parent / "outputs/result").write_text("r")
    assert (tmp_path / "outputs/result").read_text() == "r"
    for name in ("../../../x", "..", "../..", "."):
        with pytest.raises(ValueError, match="leads out of the snapshot"):
            session.check_out(request.replace(snapshot="z-0", title="u/proj", outputs=(name,)))


def test_snapshots_are_removed_with_jobs(store: Store, session: CodeSession) -> None:
    started, never = (check_out(session, name).workdir for name in ("x-0", "y-0"))
    run = start(session, "job-1", started)
    session.leave()
    assert Path(started).is_dir()
    assert not Path(never).exists()
    later = time.time() + 2 * snapshot.UNUSED_SECONDS
    assert snapshot.tidy_snapshots(store, later) == checkout.clean_snapshots() == 0
    assert Path(started).is_dir()
    shutil.rmtree(run.home)
    assert checkout.clean_snapshots() > 0
    assert not Path(started).exists()


def test_old_snapshots_are_removed_unless_written_to(
    store: Store, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkout, "clean_snapshots", lambda: 0)  # here, and not in a thread
    session = ServerSession().of(CodeSession)
    send(session)
    roots = {}
    for name in ("untouched", "runs", "wrote", "above", "edited", "newest"):
        roots[name] = Path(check_out(session, f"{name}-0").workdir)
        run = start(session, name, str(roots[name]))
        if name != "runs":
            run.append_event(ENDED)
        if name != "newest":
            os.utime(snapshot.snapshot_of(store, str(roots[name])), (1e9, 1e9))
    (roots["untouched"] / "pkg/__pycache__").mkdir()
    (roots["untouched"] / "pkg/__pycache__/b.pyc").write_bytes(b"x")
    (roots["wrote"] / "pkg/result").write_text("x")
    (roots["above"].parent / "outputs").mkdir()
    (roots["above"].parent / "outputs/model.pt").write_text("x")
    (roots["edited"] / "a.py").unlink()
    (roots["edited"] / "a.py").write_text("print(2)\n")
    snapshot.tidy_snapshots(store, time.time())
    left = [name for name, root in roots.items() if root.exists()]
    assert left == ["runs", "wrote", "above", "edited", "newest"]


def test_files_written_beside_code_are_listed(store: Store, session: CodeSession) -> None:
    root = Path(check_out(session).workdir)
    run = start(session, "job-1", str(root))
    (Path(run.experiment, "outputs")).mkdir(parents=True)
    (Path(run.experiment, "outputs") / "loss.csv").write_text("1")
    above = ("../outputs/a", "../.cache/b", "../../c", "../../../d")
    hydra = "runs/.hydra/config.yaml"
    paths = (
        "runs/a/model.pt",
        "runs/.cache/x",
        "pkg/__pycache__/b.pyc",
        ".git/x",
        "new\ndf",
        hydra,
    )
    for path in (*paths, *above):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("xy")
    (root / "data").symlink_to("/etc")
    (root / "a.py").unlink()
    (root / "a.py").write_text("print(2)\n")

    def listed(seconds: float) -> dict[str, str]:
        files = outputs.outputs_of_job(run, ASKED.replace(beside=seconds)).files
        return {file.path: file.place for file in files}

    beside = dict.fromkeys(("a.py", "new\ndf", "runs/a/model.pt", hydra), str(root))
    assert listed(0.0) == {"loss.csv": ""}
    whole = os.fsdecode(snapshot.snapshot_of(store, str(root)))
    beside |= dict.fromkeys(("u/w/outputs/a", "u/c", "d"), whole)
    assert listed(60.0) == {"loss.csv": "", **beside}
    late = outputs.outputs_of_job(run, ASKED.replace(beside=-1.0))
    assert late.left_out == (f"{root} (it takes too long to look through)",)
    assert [file.path for file in late.files] == ["loss.csv"]
    shutil.rmtree(whole)
    assert listed(60.0) == {"loss.csv": ""}


def test_file_written_over_input_is_listed_as_file_of_program(
    store: Store, session: CodeSession, tmp_path: Path
) -> None:
    """For the experiment, and for the nodes of the next attempt."""
    own = tmp_path / "u/w/my proj"
    (own / "data").mkdir(parents=True)
    for name in ("read", "written"):
        (own / "data" / name).write_text("of the node")
        os.utime(own / "data" / name, (1e9, 1e9))
    target = Target(kind="auto", name="a.py")
    request = CheckOut(
        tree=DIGEST, snapshot="x", title="u/w/my proj", beside=str(own), target=target,
        inputs=("data",),
    )  # fmt: skip
    root = session.check_out(request).workdir
    run = run_dir("job-1", workdir=root, env={"ORCHESTRATOR_EXPERIMENT": str(tmp_path)})
    session.job_started(run, run.read_spec())
    Path(root, "data/written").write_text("of the program")
    (file,) = outputs.outputs_of_job(run, ASKED.replace(beside=60.0)).files
    assert (file.path, file.place, file.target) == ("data/written", root, f"{own}/data/written")
    read = ReadFile(place=root, path=file.path, offset=0, changed=file.changed)
    assert outputs.read_piece(read).data == b"of the program"
    carried = job_files.written_files(run, AskJobFiles(job="job-1", part=0)).files
    # Code that was copied in the same tick of the clock may be among them.
    of_input = [file for file in carried if file.path.startswith("data")]
    found = {file.path: file.kind for file in of_input if file.place == job_files.WORK}
    assert found == {"data": "directory", "data/written": "file"}


def test_snapshot_of_ignores_other_directories(store: Store, tmp_path: Path) -> None:
    run = RunDir("job-1", 0)
    run.create()
    (tmp_path / "precious").mkdir()
    link = Path(os.fsdecode(store.snapshots)) / "evil"
    link.symlink_to(tmp_path)
    for workdir in (str(tmp_path / "precious"), str(link / "precious"), f"{link}/../.."):
        assert snapshot.snapshot_of(store, workdir) == b""


def test_unused_contents_are_collected(store: Store, session: CodeSession) -> None:
    check_out(session)
    later = time.time() + 8 * 86400
    snapshot.tidy_snapshots(store, later)
    assert os.listdir(store.snapshots) == []  # noqa: PTH208
    assert store.collect(time.time()) == 0
    assert store.collect(later) > 0
    with pytest.raises(ValueError, match="has to come again"):
        check_out(session, "z-0")


class Finder:
    """A finder of setuptools, as an editable install puts it behind the path."""

    __module__ = "__editable___mine_finder"


def test_editable_install_is_redirected_to_snapshot(
    store: Store, session: CodeSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a directory on the path, or by names; one that no directory answers is named."""
    beside = tmp_path / "proj"
    packages = beside / ".venv/lib/python3.11/site-packages"
    for path in (beside / "src/mine", packages):
        path.mkdir(parents=True)
    mapping = {"mine": f"{beside}/src/mine", "mod": f"{beside}/lib/mod.py", "other": "/opt/o"}
    monkeypatch.setitem(
        sys.modules, Finder.__module__, cast("Any", SimpleNamespace(MAPPING=mapping))
    )
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    monkeypatch.setattr(sys, "path", [*sys.path, str(beside / "flat"), str(packages)])
    target = Target(kind="module", name="a")
    request = CheckOut(tree=DIGEST, snapshot="x", title="t", beside=str(beside), target=target)
    checked = session.check_out(request)
    assert (checked.installed, checked.strange) == (("flat", "src", "lib"), ())
    spec = bare_spec(workdir=checked.workdir).replace(env={"PYTHONPATH": "theirs"})
    first = checkout.spec_with_snapshot_first(spec)
    places = [f"{checked.workdir}/{name}" for name in ("flat", "src", "lib")]
    assert first.env["PYTHONPATH"].split(":") == [*places, "theirs"]
    assert checkout.spec_with_snapshot_first(first) == first
    mapping["renamed"] = f"{beside}/src/mine"
    assert session.check_out(request.replace(snapshot="y")).strange == ("renamed",)
    none = session.check_out(request.replace(snapshot="z", beside=str(tmp_path / "none")))
    assert none.installed == none.strange == ()
