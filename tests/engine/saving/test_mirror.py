"""Checkpoints go to a mirror in the background, and a training elsewhere goes on from there."""

import secrets
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import s3fs
from moto.server import ThreadedMotoServer

from orchestrator.common.errors import CheckFailed
from orchestrator.engine.saving import mirror
from orchestrator.engine.saving.mirror import Mirror
from orchestrator.engine.saving.ownership import TrainingRun, is_of_run
from orchestrator.records import checkpoint_store
from tests.engine.core.test_parity import fsdp
from tests.engine.saving.test_resume import STEPS, job, losses, saving
from tests.engine.worlds import run
from tests.records.test_checkpoint_store import FILES, save

UNTIL_8 = {"training": {"max_steps": 8}}, {"scheduler": {"total_steps": STEPS}}


@pytest.fixture(params=["file", "s3"])
def url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/remote"
        return
    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    bucket = f"bucket-{secrets.token_hex(4)}"
    s3fs.S3FileSystem().mkdir(bucket)
    yield f"s3://{bucket}/runs/mine"
    server.stop()


OWN = TrainingRun("own")


def copied(url: str, places: Sequence[Path], keep: int = 2) -> None:
    for place in places:
        copies = Mirror(url, keep, partial(is_of_run, OWN))
        copies.copy(place, list(FILES), whole=True)
        copies.close()


def test_mirror_returns_copies_and_skips_damaged(tmp_path: Path, url: str) -> None:
    saved = [save(tmp_path / "here", step, progress={"step": step}) for step in (1, 2, 3)]
    copied(url, saved)
    files, root = mirror.remote_files(url)
    names = sorted(path.rpartition("/")[2] for path in files.ls(root, detail=False))
    assert names == ["step_00000002", "step_00000003"]
    said: list[str] = []
    there = mirror.fetch_checkpoint(url, tmp_path / "there", said.append)
    assert there == tmp_path / "there/step_00000003"
    found = checkpoint_store.load_checkpoint(there)
    assert checkpoint_store.verify_checkpoint(found) == [] and found.progress == {"step": 3}
    files.pipe_file(f"{root}/step_00000003/__0_0.distcp", bytes(1000))
    again = mirror.fetch_checkpoint(url, tmp_path / "again", said.append)
    assert again == tmp_path / "again/step_00000002"
    assert "step 3 of" in said[1] and "__0_0.distcp is damaged" in said[1]
    one = mirror.fetch_checkpoint(f"{url}/step_00000002", tmp_path / "one", print)
    assert one == tmp_path / "one/step_00000002"
    assert mirror.fetch_checkpoint(f"{url}/nothing", tmp_path / "nothing", print) is None


def test_mirror_keeps_checkpoints_of_other_run(tmp_path: Path, url: str) -> None:
    other = save(tmp_path / "other", 9, progress={"run": vars(TrainingRun("other"))})
    saved = [save(tmp_path / "own", n, progress={"run": vars(OWN)}) for n in (1, 2, 3)]
    copied(url, [other, *saved], keep=1)
    files, root = mirror.remote_files(url)
    names = sorted(path.rpartition("/")[2] for path in files.ls(root, detail=False))
    assert names == ["step_00000003", "step_00000009"]


def test_damaged_copy_is_not_published(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = save(tmp_path, 1)
    (place / "__0_0.distcp").write_bytes(bytes(1000))
    copied(url, [place])
    said = capsys.readouterr().out
    assert f"step_00000001 is not in {url}: __0_0.distcp was damaged on its way" in said
    assert mirror.fetch_checkpoint(url, tmp_path / "there", print) is None


class Slow(Mirror):
    """Notes what it copies, and waits in the first one."""

    def __init__(self, url: str) -> None:
        self.copies: list[str] = []
        self.begun, self.goes_on = threading.Event(), threading.Event()
        super().__init__(url, 1, partial(is_of_run, OWN))

    def _copy(self, checkpoint: Path, names: Sequence[str], *, whole: bool) -> None:
        self.begun.set()
        self.goes_on.wait()
        self.copies.append(checkpoint.name)
        raise OSError("no way")


def test_mirror_skips_to_newest_and_reports_failure_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = Slow(f"file://{tmp_path}/remote")
    first, *others = [save(tmp_path / "here", step) for step in (1, 2, 3)]
    slow.copy(first, [], whole=True)
    assert slow.begun.wait(60)
    # The call returns at once.
    for place in others:
        slow.copy(place, [], whole=True)
    slow.goes_on.set()
    slow.close()
    assert slow.copies == ["step_00000001", "step_00000003"]
    assert capsys.readouterr().out.count("WARNING: checkpoint.mirror: step_00000001 is not") == 1


def test_unusable_url_is_refused() -> None:
    with pytest.raises(CheckFailed, match="nowhere://x cannot be opened: "):
        Mirror("nowhere://x", 1, partial(is_of_run, OWN))


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the same training from its first step to its last."""
    one = job(tmp_path_factory.mktemp("whole"), "whole", [1, 1], fsdp("full_shard"), saving())
    assert run(one) == [[0, 0]]
    return losses(one)


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
def test_new_machines_resume_from_mirror(
    tmp_path: Path, apart: bool, whole: dict[int, float]
) -> None:
    """On one disk, where the mirror is named; and on disks of their own, where each node copies
    its part, and the config finds it."""
    own = {"checkpoint": {"mirror": f"file://{tmp_path}/remote"}}
    strategy = fsdp("full_shard")
    first = job(tmp_path, "first", [1, 1], strategy, saving(), own, *UNTIL_8, own_disks=apart)
    named = saving(resume=f"file://{tmp_path}/remote"), {}
    found = saving(resume="auto"), own
    how = found if apart else named
    again = job(tmp_path, "again", [1, 1], strategy, *how, own_disks=apart)
    assert run(first, again) == [[0, 0]] * 2, again.output()
    assert f"step 8 comes from file://{tmp_path}/remote" in again.output()
    assert losses(again) == {step: whole[step] for step in range(9, STEPS + 1)}
