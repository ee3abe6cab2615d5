"""Finds which torch, NCCL and drivers are installed, from their files: none is imported."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import sys
from typing import Any

from orchestrator.node.job.run_directory import home as files_home
from orchestrator.node.machine import sysfs
from orchestrator.protocol.facts import Software

NCCL_WHEEL = re.compile(r"nvidia_nccl_cu(\d+)-(\d+(?:\.\d+)+)\.dist-info")
NCCL_CONDA = re.compile(r"nccl-(\d+(?:\.\d+)+)-.*\.json")
NCCL_FILES = (
    "/usr/lib/x86_64-linux-gnu/libnccl.so.2.*",
    "/usr/lib/aarch64-linux-gnu/libnccl.so.2.*",
    "/usr/lib64/libnccl.so.2.*",
    "/usr/local/lib/libnccl.so.2.*",
)
# Where people make their environments, below the working directory, the home, or the root.
ENVIRONMENTS = (
    *("{work}/.venv", "{work}/venv", "{work}/env", "~/.venv", "~/venv", "~/env", "~/venvs/*"),
    *("~/envs/*", "~/.venvs/*", "~/.virtualenvs/*", "~/.conda/envs/*", "~/micromamba/envs/*"),
    *("~/miniconda3", "~/miniforge3", "~/mambaforge", "~/anaconda3", "~/conda"),
    *("~/miniconda3/envs/*", "~/miniforge3/envs/*", "~/mambaforge/envs/*", "~/anaconda3/envs/*"),
    *("~/conda/envs/*", "~/.pyenv/versions/*", "/opt/conda", "/opt/conda/envs/*", "/opt/venv"),
    *("/opt/miniconda3", "/opt/miniconda3/envs/*", "/usr/local"),
)
MOST_PYTHONS = 8


def software(root: str = "") -> tuple[str, Software]:
    """Return torch's version, and what else is known of it and of the drivers."""
    home = torch_home()
    versions = sysfs.text(os.path.join(home, "version.py")) if home else ""
    cuda, hip = value(versions, "cuda"), value(versions, "hip")
    nccl = ""
    if cuda:
        nccl = nccl_version(home, cuda, root)
    elif hip:
        nccl = rccl_version(root)
    return value(versions, "__version__"), Software(
        cuda=cuda,
        hip=hip,
        nccl=nccl,
        nvidia_driver=sysfs.text(f"{root}/sys/module/nvidia/version"),
        amd_driver=sysfs.text(f"{root}/sys/module/amdgpu/version"),
    )


def pythons_with_torch(workdir: str) -> tuple[str, ...]:
    """Look for environments with torch where the chosen Python has none; as they may be typed."""
    home = os.path.expanduser("~")
    found: dict[str, None] = {}
    ours = os.path.join(files_home(), "environments/newest")
    work, of_login = glob.escape(workdir), glob.escape(home)
    usual = (p.replace("{work}", work).replace("~", of_login, 1) for p in ENVIRONMENTS)
    for path in (glob.escape(ours), *usual):
        for version in sorted(glob.glob(f"{path}/lib/python3*/site-packages/torch/version.py")):
            python = os.path.join(version.rpartition("/lib/python3")[0], "bin/python")
            if os.access(python, os.X_OK):
                shown = f"~{python[len(home) :]}" if python.startswith(home + "/") else python
                found[shown] = None
    return tuple(found)[:MOST_PYTHONS]


def torch_home() -> str:
    """Find where torch is without importing it, which takes over a second."""
    spec = importlib.util.find_spec("torch")
    return os.path.dirname(spec.origin) if spec is not None and spec.origin else ""


def accelerate() -> dict[str, Any]:
    """Return accelerate's version; importing it would import torch."""
    spec = importlib.util.find_spec("accelerate")
    if spec is None or not spec.origin:
        return {}
    version = value(sysfs.text(spec.origin), "__version__") or "of an unknown version"
    return {"accelerate": version}


def value(text: str, name: str) -> str:
    """Return the text that version.py gives a name: `cuda: Optional[str] = '12.8'` -> 12.8."""
    match = re.search(rf"^{name}\b[^=\n]*= *['\"]([^'\"\n]*)['\"]", text, re.MULTILINE)
    return match.group(1) if match else ""


def nccl_version(home: str, cuda: str, root: str = "") -> str:
    """Return the version of the wheel next to torch, or of conda's, or of the system's."""
    major = cuda.partition(".")[0]
    wheels = [
        match for match in map(NCCL_WHEEL.fullmatch, sysfs.names(os.path.dirname(home))) if match
    ]
    for match in sorted(wheels, key=lambda wheel: wheel.group(1) != major):
        return match.group(2)
    for name in sysfs.names(os.path.join(sys.prefix, "conda-meta")):
        conda = NCCL_CONDA.fullmatch(name)
        if conda:
            return conda.group(1)
    for pattern in NCCL_FILES:
        for path in glob.glob(root + pattern):
            version = path.partition(".so.")[2]
            if re.fullmatch(r"\d+\.\d+(\.\d+)*", version):
                return version
    return ""


def rccl_version(root: str = "") -> str:
    path = "/opt/rocm/include/rccl/rccl.h"
    text = sysfs.text(root + path)
    parts = [
        re.search(rf"^#define NCCL_{part} (\d+)", text, re.MULTILINE)
        for part in ("MAJOR", "MINOR", "PATCH")
    ]
    return ".".join(match.group(1) for match in parts if match)
