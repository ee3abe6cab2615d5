"""The conditions for a complete environment, and the names that lead to it."""

from pathlib import Path

import pytest

from orchestrator.node.environments.place import Environments

KEY, OTHER = "0123456789abcdef", "fedcba9876543210"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environments:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path))
    root = tmp_path / "environments"
    root.mkdir(mode=0o700)
    packages = root / KEY / "lib/python3.11/site-packages"
    (packages / "My_Package-1.5.dist-info").mkdir(parents=True)
    (root / KEY / "bin").mkdir()
    (root / KEY / "bin/python").symlink_to("/bin/sh")
    return Environments()


def test_packages_is_none_without_seal_or_python(here: Environments) -> None:
    assert here.packages(KEY) is None
    here.seal(KEY)
    assert here.packages(KEY) == {"my-package": "1.5"}
    Path(here.path(KEY), "bin/python").unlink()
    assert here.packages(KEY) is None
    here.discard(KEY)
    assert not Path(here.path(KEY)).exists()


def test_names_link_to_environments(here: Environments) -> None:
    here.link_all("", OTHER)
    here.link_all("", KEY)
    assert Path(here.root, "newest").resolve() == Path(here.path(KEY))
    (Path(here.root) / "mine").mkdir()
    with pytest.raises(ValueError, match="is not a link"):
        here.link_all("mine", KEY)
    for name in ("../x", ".x", "a/b"):
        with pytest.raises(ValueError, match="not the name"):
            here.link_all(name, KEY)
    with pytest.raises(ValueError, match="not the key"):
        here.path("../x")


def test_prepare_refuses_directory_writable_by_everybody(here: Environments) -> None:
    Path(here.root).chmod(0o777)
    with pytest.raises(ValueError, match="may be written by everybody"):
        here.prepare()


def test_prepare_refuses_directory_that_others_could_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory around it, and that of what a link leads to; one like /tmp is none of these."""
    around = tmp_path / "around"
    around.mkdir()
    around.chmod(0o1777)
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(around))
    Environments().prepare()
    around.chmod(0o777)
    (tmp_path / "link").mkdir()
    (tmp_path / "link/environments").symlink_to(around / "environments")
    for home in (around, tmp_path / "link"):
        monkeypatch.setenv("ORCHESTRATOR_HOME", str(home))
        with pytest.raises(ValueError, match="around may be written by everybody, who could"):
            Environments().prepare()
