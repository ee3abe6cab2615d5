"""The code that is kept with an experiment comes back as it was, or not at all."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from orchestrator.common.errors import CheckFailed
from orchestrator.head.transfer import archive
from orchestrator.head.transfer.listing import Rules
from orchestrator.head.transfer.scan import Scan, Tree


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    work = tmp_path / "work"
    (work / "pkg/void").mkdir(parents=True)
    (work / "pkg/run.sh").write_bytes(b"x" * 5000)
    (work / "pkg/run.sh").chmod(0o750)
    (work / os.fsdecode(b"\xff\nq' \xc3\xa9" + b"long" * 40)).write_bytes(b"odd")
    (work / "way").symlink_to("/etc/hostname")
    (work / "empty").write_bytes(b"")
    return scan(work)


def scan(directory: Path) -> Tree:
    return Scan(os.fsencode(directory), Rules(everything=True)).tree()


def test_restore_gives_same_tree(tree: Tree, tmp_path: Path) -> None:
    archive.write_archive(tree, tmp_path / "code.tar.gz")
    assert (tmp_path / "code.tar.gz").stat().st_mode & 0o777 == 0o600
    archive.restore_archive(tmp_path / "code.tar.gz", tree.digest, tmp_path / "again")
    assert scan(tmp_path / "again").entries == tree.entries


def test_write_leaves_out_large_files_by_name(tree: Tree, tmp_path: Path) -> None:
    for name, size in (("weights.bin", 3_000_000), ("huge.bin", 5_000_000)):
        (tmp_path / "work" / name).write_bytes(bytes(size))
    found = Scan(os.fsencode(tmp_path / "work"), Rules(largest_file=4))
    with pytest.raises(CheckFailed, match=r"huge.bin has 5 MB"):
        found.tree()
    scanned = found.ready(60)
    assert scanned is not None
    kept = archive.write_archive(scanned, tmp_path / "code.tar.gz", 100_000)
    archive.restore_archive(tmp_path / "code.tar.gz", kept.digest, tmp_path / "again")
    assert kept.digest == tree.digest
    words = archive.missing_code(found, scanned, kept)
    assert "without large files: weights.bin has 3 MB" in words and "huge.bin has 5 MB" in words
    assert archive.missing_code(found, scanned, scanned).count("has") == 1


def test_write_skips_file_edited_since_scan(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "work/empty").write_text("no more")
    # The file was empty when it was read.
    archive.write_archive(tree, tmp_path / "code.tar.gz")
    (tmp_path / "work/pkg/run.sh").write_text("y" * 5000)
    archive.write_archive(tree, tmp_path / "other.tar.gz")
    assert not list(tmp_path.glob("*other*"))


def test_restore_refuses_other_code(tree: Tree, tmp_path: Path) -> None:
    kept = tmp_path / "code.tar.gz"
    archive.write_archive(tree, kept)
    with pytest.raises(CheckFailed, match="is not the code that this run had"):
        archive.restore_archive(kept, "0" * 64, tmp_path / "other")
    kept.write_bytes(kept.read_bytes()[:300])
    with pytest.raises(CheckFailed, match="cannot be read"):
        archive.restore_archive(kept, tree.digest, tmp_path / "again")


@pytest.mark.parametrize("name", ["../evil", "{}/evil", "a/../../evil"])
def test_restore_writes_nothing_outside(tmp_path: Path, name: str) -> None:
    kept, name = tmp_path / "code.tar.gz", name.format(tmp_path)
    with tarfile.open(kept, "w:gz") as file:
        info = tarfile.TarInfo(name)
        info.size = 1
        file.addfile(info, io.BytesIO(b"x"))
    with pytest.raises(CheckFailed, match=r"cannot be read|is not the code"):
        archive.restore_archive(kept, "0" * 64, tmp_path / "inside/directory")
    assert not [path for path in tmp_path.rglob("evil") if "inside/directory" not in str(path)]


def test_restore_follows_no_link(tmp_path: Path) -> None:
    kept = tmp_path / "code.tar.gz"
    with tarfile.open(kept, "w:gz") as file:
        link = tarfile.TarInfo("out")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
        file.addfile(link)
        file.addfile(tarfile.TarInfo("out/evil"))
    with pytest.raises(CheckFailed, match="cannot be read"):
        archive.restore_archive(kept, "0" * 64, tmp_path / "inside")
    assert not (tmp_path / "evil").exists()
