"""Our program as a node keeps it, unpacked and compiled once for all hosts of a worker's clusters.

A node that sees a version for the first time compiles what it runs, 0.4 s of a core, and each rank
of the engine as much again: with hundreds of hosts that takes minutes. A first launch on a node
without our files is tested in tests/node/test_install.py, the clusters on loopback addresses, and
the demo.
"""

import atexit
import compileall
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

from orchestrator.head.nodes.library import own_library
from orchestrator.node.install import unpack


@functools.cache
def compiled() -> Path:
    place = Path(tempfile.mkdtemp(prefix="orch-library-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    ours = own_library()
    unpack({name: data.decode() for name, data in ours.files}, str(place / ours.digest))
    compileall.compile_dir(place, quiet=2)
    return place / ours.digest


def give_to(home: Path) -> None:
    """Put the compiled library into ORCHESTRATOR_HOME, as after a launch.

    Its files are hard links: no host writes into them, and a copy costs 0.2 s of a core.
    """
    home.mkdir(mode=0o700)
    (home / "lib").mkdir(mode=0o700)
    subprocess.run(["cp", "-al", str(compiled()), str(home / "lib")], check=True)
