"""Keeps what torch.compile and Triton build on this node, by program and version of torch.

By default it lies below /tmp, which goes with a container or a reboot, and which all programs fill.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
import shutil
import zlib
from collections.abc import Mapping

from orchestrator.common import files
from orchestrator.node.job.run_directory import machine_name
from orchestrator.protocol.spec import Spec

# Each variable with its part of the directory.
VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "torchinductor", "TRITON_CACHE_DIR": "triton"}
# The bytes of all directories of a machine, which are measured once in this time. What was used
# since then stays.
MOST_BYTES, SECONDS = 8 << 30, 86400.0
PRUNED = ".pruned"


def cache_variables(spec: Spec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that name this program's directory, without those that are set."""
    names = [name for name in VARIABLES if name not in spec.env and name not in environ]
    path = cache_directory(spec)
    # Without it, each program has the default.
    with contextlib.suppress(OSError):
        os.makedirs(path, mode=0o700, exist_ok=True)
        os.utime(path)
        return {name: os.path.join(path, VARIABLES[name]) for name in names}
    return {}


def cache_directory(spec: Spec) -> str:
    """Return the directory of a program and the torch of its Python, on this machine."""
    target, python = spec.target, "".join(spec.agent[:1])
    library = f"{os.path.dirname(os.path.dirname(python))}/lib/python3*/site-packages"
    torch = "".join(glob.glob(f"{library}/torch-*.dist-info")[:1])
    key = hashlib.sha256("\0".join([target.kind, target.name, python, torch]).encode()).hexdigest()
    name = re.sub(r"[^\w.-]", "_", os.path.basename(target.name))[:40]
    return os.path.join(caches_root(), f"{name}-{key[:12]}")


def caches_root() -> str:
    # Machines that share a home have other processors.
    name = f"{zlib.crc32(os.fsencode(machine_name())):08x}"
    return os.path.join(os.path.abspath(files.our_directory()), "compiled", name)


def prune_caches(now: float) -> None:
    """Remove the directories that were used longest ago until the rest has MOST_BYTES."""
    stamp = os.path.join(caches_root(), PRUNED)
    with contextlib.suppress(OSError):
        if os.path.exists(stamp) and now - os.stat(stamp).st_mtime < SECONDS:
            return
        os.close(os.open(stamp, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        os.utime(stamp)
        found = [
            entry for entry in os.scandir(caches_root()) if entry.is_dir(follow_symlinks=False)
        ]
        used = sorted(
            (entry.stat().st_mtime, directory_size(entry.path), entry.path) for entry in found
        )
        total = sum(each[1] for each in used)
        for when, count, path in used:
            if total > MOST_BYTES and now - when > SECONDS:
                shutil.rmtree(path, ignore_errors=True)
                total -= count


def directory_size(path: str) -> int:
    """Return the bytes of the files below a directory."""
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(directory, name)).st_size
    return total
