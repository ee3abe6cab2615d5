"""The first gear on a machine that has just booted."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tests.clusters.require import lacking

ROOT = Path(__file__).parents[1]
SECONDS_SINCE_BOOT = 5


def test_the_first_gear_does_not_know_how_long_the_machine_is_up() -> None:
    """Clocks of the machine begin there: a time namespace has the same."""
    ahead = SECONDS_SINCE_BOOT - int(time.monotonic())
    booted = ["unshare", "--time", f"--monotonic={ahead}", f"--boottime={ahead}", "--fork"]
    if subprocess.run([*booted, "true"], check=False, capture_output=True).returncode:
        lacking("this login may not make a time namespace")
    uptime = [*booted, sys.executable, "-c", "import time; print(int(time.monotonic()))"]
    assert int(subprocess.check_output(uptime)) < 60
    gear = [sys.executable, "-m", "pytest", "-n", "2", "-m", "fast", "-p", "no:cacheprovider"]
    subprocess.run([*booted, *gear, ROOT / "tests"], cwd=ROOT, check=True)
