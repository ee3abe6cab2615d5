"""Make the virtual environment of the launchers that launch.py compares us with.

    python scripts/bench/peers.py [--peers DIR]

torch is installed first, in our nodes' version; otherwise pip would choose one for them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

from ground import PEERS, versions

TORCH = "torch==2.13.0"
CPU_TORCH = "https://download.pytorch.org/whl/cpu"
LAUNCHERS = ("torchrunx", "deepspeed", "torchmonarch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--peers", type=Path, default=PEERS)
    parser.add_argument("--index", default=CPU_TORCH, help="where torch comes from; '' for PyPI")
    options = parser.parse_args()
    directory: Path = options.peers
    if directory.exists() and directory.stat().st_uid != os.geteuid():
        sys.exit(f"{directory} belongs to another user: choose another one with --peers")
    if not (directory / "bin/python").exists():
        venv.create(directory, with_pip=True)
    python = directory / "bin/python"
    index = ["--index-url", options.index] if options.index else []
    pip(python, TORCH, "numpy", *index)
    pip(python, "setuptools", *LAUNCHERS)
    print(f"{python}: {versions(python)}")


def pip(python: Path, *words: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "--quiet", *words], check=True)


if __name__ == "__main__":
    main()
