"""What counts as a whole environment, and what prune may remove."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.node.environments.place import Environments

KEY, OTHER = "0123456789abcdef", "fedcba9876543210"


@pytest.fixture
def here(tmp_path: Path) -> Environments:
    tmp_path.chmod(0o700)
    for key in (KEY, OTHER):
        packages = tmp_path / key / "lib/python3.11/site-packages"
        (packages / "My_Package-1.5.dist-info").mkdir(parents=True)
        (packages / "mine.py").write_text("a = 1\n")
        (tmp_path / key / "bin").mkdir()
        (tmp_path / key / "bin/python").symlink_to("/bin/sh")
    return Environments(str(tmp_path))


def test_one_without_its_mark_or_python_is_not_whole(here: Environments) -> None:
    assert here.packages(KEY) is None
    here.seal(KEY)
    assert here.packages(KEY) == {"my-package": "1.5"}
    Path(here.path(KEY), "bin/python").unlink()
    assert here.packages(KEY) is None
    here.discard(KEY)
    assert not Path(here.path(KEY)).exists()


def test_names_lead_to_environments_and_keep_them(
    here: Environments, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path_factory.mktemp("home")))
    here.link_all("", OTHER)
    here.link_all("", KEY)
    assert Path(here.root, "newest").resolve() == Path(here.path(KEY))
    (Path(here.root) / "mine").mkdir()
    assert here.prune()[0] == [OTHER]
    assert sorted(path.name for path in Path(here.root).iterdir()) == [KEY, "mine", "newest"]
    with pytest.raises(ValueError, match="is not a link"):
        here.link_all("mine", KEY)
    for name in ("../x", ".x", "a/b"):
        with pytest.raises(ValueError, match="not the name"):
            here.link_all(name, KEY)
    with pytest.raises(ValueError, match="not the key"):
        here.path("../x")


def test_a_directory_of_everybody_is_refused(here: Environments) -> None:
    Path(here.root).chmod(0o777)
    with pytest.raises(ValueError, match="may be written by everybody"):
        here.prepare()


def test_one_that_somebody_else_could_put_another_in_the_place_of_is_refused(
    tmp_path: Path,
) -> None:
    """The directory around it, and that of what a link leads to; one like /tmp is none of these."""
    around, root = tmp_path / "around", tmp_path / "around/environments"
    around.mkdir()
    around.chmod(0o1777)
    Environments(str(root)).prepare()
    around.chmod(0o777)
    (tmp_path / "link").symlink_to(root)
    for path in (root, tmp_path / "link"):
        with pytest.raises(ValueError, match="around may be written by everybody, who could"):
            Environments(str(path)).prepare()
