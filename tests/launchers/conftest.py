"""One Slurm for the tests of a module, and a user on its login node."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.slurm import Slurm, require_slurm, with_variable
from tests.launching import BIN, Command


class Login:
    """A login node: an empty directory on the disk that all nodes share."""

    def __init__(self, slurm: Slurm, directory: Path) -> None:
        self.slurm = slurm
        self.directory = directory

    def command(self, *words: str, **env: str) -> Command:
        home = {"ORCHESTRATOR_HOME": str(self.directory / "home")}
        return Command([*words], self.directory, {**self.slurm.env, **home, **env})

    def typed(self, *words: str, **env: str) -> Command:
        return self.command(str(BIN / "orchestrator"), *words, **env)

    def inside(self, *words: str, **env: str) -> Command:
        """A launch in an allocation of both nodes."""
        launch = [str(BIN / "master_launch"), *words]
        return self.command("salloc", "--quiet", "--nodes=2", *launch, **env)

    def script(self, text: str, name: str = "job.py") -> str:
        (self.directory / name).write_text(text)
        return name

    @property
    def experiment(self) -> Path:
        return sorted((self.directory / "experiments").glob("*/job.json"))[-1].parent

    @property
    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.experiment / "job.json").read_text())
        return found

    def log(self, node: int) -> str:
        """Of a job that runs: empty as long as there is none."""
        found = (self.directory / "experiments").glob(f"*/logs/node_{node}_*.txt")
        return "".join(path.read_text() for path in sorted(found))


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    require_slurm()
    # munge wants directories that everybody can enter, which pytest's own are not.
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as place:
        with Slurm(Path(place)) as running:
            yield running
        assert with_variable(f"SLURM_CONF={place}/") == []


@pytest.fixture
def login(slurm: Slurm, tmp_path: Path) -> Iterator[Login]:
    yield Login(slurm, tmp_path)
    # Pytest shows it for a failed test.
    print(slurm.controller_log())
    slurm.run("scancel", "--user", str(slurm.user))
