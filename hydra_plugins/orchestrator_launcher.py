"""A launcher of Hydra: `python train.py -m hydra/launcher=orchestrator lr=1,2` is a sweep.

Each job runs on a node of the list as `train.py lr=1`, and returns the metric that the options
name, for sweepers that ask for it.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.plugins.launcher import Launcher

# What `hydra.launcher` has: options of `orchestrator sweep`, as they are typed.
CONFIG = {
    "_target_": "hydra_plugins.orchestrator_launcher.OrchestratorLauncher",
    "options": "",
}
ConfigStore.instance().store(group="hydra/launcher", name="orchestrator", node=CONFIG)


class OrchestratorLauncher(Launcher):
    """Runs the jobs of a multirun as the members of a sweep."""

    def __init__(self, options: str) -> None:
        self.options = shlex.split(options)

    def setup(self, **_: Any) -> None:
        """Take nothing of this process along: a member composes its own config."""

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> list[JobReturn]:
        spec = sys.modules["__main__"].__spec__
        program = ["python", "-m", spec.name] if spec else [os.path.relpath(sys.argv[0])]
        jobs = [filter_overrides(overrides) for overrides in job_overrides]
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator", "sweep", "--json", *self.options, "-"],
            input="".join(shlex.join([*program, *job]) + "\n" for job in jobs),
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if not done.stdout:
            raise RuntimeError(f"the sweep has ended with {done.returncode}, as said above")
        ends = {member["member"]: member for member in json.loads(done.stdout)["members"]}
        return [returned(job, ends.get(at, {})) for at, job in enumerate(jobs)]


def returned(job: Sequence[str], end: dict[str, Any]) -> JobReturn:
    """Return what Hydra is told of a member."""
    if end.get("state") in ("done", "pruned"):
        return JobReturn(overrides=job, status=JobStatus.COMPLETED, _return_value=end["value"])
    error = RuntimeError(f"{end.get('state', 'not run')}: {end.get('problem', '')}")
    return JobReturn(overrides=job, status=JobStatus.FAILED, _return_value=error)
