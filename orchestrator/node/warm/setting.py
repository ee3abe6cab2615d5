"""Finds all that a warm process was started with and could not change later.

Two jobs with equal settings may be started from the same warm process. Names are words for people:
they say why a start was cold.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence

from orchestrator.common import hiding
from orchestrator.node.job.ranks.agent_start import limits
from orchestrator.node.job.supervisor import agent_environment
from orchestrator.protocol.spec import Spec

AGENT = os.path.join(
    "node", "job", "ranks", "fast_torchrun.py"
)  # the only agent that can be made to wait
# Read by C code or by packages while they are imported: what Python code reads is seen (agent.py).
AT_IMPORT = re.compile(
    r"PATH|HOME|(PYTHON|LD_|CUDA|NVIDIA|HIP_|ROCR_|ROCM_|HSA_|TORCH|PYTORCH|C10_|ATEN_|OMP_|GOMP_"
    r"|KMP_|MKL_|OPENBLAS_|BLIS_|VECLIB_|NUMEXPR_|DNNL_|ONEDNN_|NPY_|TRITON|MALLOC_|LC_|CONDA_"
    r"|HF_|TRANSFORMERS_|TOKENIZERS_|MPL).*|GLIBC_TUNABLES|LANG|LANGUAGE|TZ|TZDIR|TMPDIR|TEMP|TMP"
    r"|VIRTUAL_ENV|LOGLEVEL|XDG_(CACHE|CONFIG|DATA)_HOME"
)
PRIVILEGES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
IOPRIO_GET = {"x86_64": 252, "aarch64": 31}  # numbers of the system call
IOPRIO_WHO_PROCESS = 1
PR_GET_THP_DISABLE = 42
NAMESPACES = ("mnt", "pid", "net", "user", "ipc", "uts")
MACHINE = "the machine"
JOB = "the job"  # whose attempts alone start from it, where no launch asked for warm nodes
PYTHON = "the Python"  # its path, and what changes with it, in lines
SESSION = re.compile(r"session-[^/]*[.]scope")  # each login has its own


def unsuitable(spec: Spec, environ: Mapping[str, str]) -> str:
    """Say why a job like this one can never start warm, or nothing."""
    if spec.start != "fork":
        return "its ranks do not start from torchrun's process (--start plain, --no-torchrun)"
    if len(spec.agent) < 3 or not spec.agent[2].endswith(AGENT):
        return "another launcher starts its ranks"
    if "SLURM_STEP_ID" in environ:
        return "Slurm ends all processes of a job with the job"
    path = {**environ, **spec.env}.get("PYTHONPATH", "")
    if (
        "PYTHONPATH" not in spec.unset
        and path
        and not all(map(os.path.isabs, path.split(os.pathsep)))
    ):
        return "PYTHONPATH has an entry that is not absolute"
    return ""


def matters(name: str) -> bool:
    return AT_IMPORT.fullmatch(name) is not None and not hiding.NAME.search(name)


def public_environment(spec: Spec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this job that hold nothing secret."""
    variables = agent_environment(spec, "", environ)
    secrets = hiding.of_environment(variables, spec.secrets)
    return {
        name: value
        for name, value in sorted(variables.items())
        if not hiding.NAME.search(name)
        and value == hiding.hide(hiding.redacted_text(value), secrets)
    }


def import_environment(spec: Spec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this job that packages may read when they are imported."""
    variables = public_environment(spec, environ)
    return {name: value for name, value in variables.items() if matters(name)}


def setting_of(spec: Spec, environ: Mapping[str, str], library: str, umask: int) -> dict[str, str]:
    """Return all that a warm process for this job has to have been started with."""
    return {
        MACHINE: machine(),
        "the version of orchestrator": os.path.basename(library),
        PYTHON: "\n".join([spec.agent[0], *identity(spec.agent[0])]),
        "the umask": f"{umask:o}",
        "the hard limits of the login": str([hard for _, _, hard in limits()]),
        **inherited(),
        "the directory ~/.orchestrator": environ.get("ORCHESTRATOR_HOME", ""),
        **import_environment(spec, environ),
        **({JOB: spec.attempt.first_job} if spec.attempt is not None and not spec.warm else {}),
    }


def inherited() -> dict[str, str]:
    """Return what a process has of its parent and keeps through all that it executes."""
    lines = (line.partition(":") for line in text("/proc/self/status").splitlines())
    status = {name: value.strip() for name, _, value in lines}
    policy = text("/proc/self/numa_maps").split(maxsplit=2)[1:2]  # as numactl sets it
    thp = ctypes.CDLL(None).prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0)
    priorities = (
        os.getpriority(os.PRIO_PROCESS, 0),
        (os.sched_getscheduler(0), os.sched_getparam(0).sched_priority),
        io_priority(),
        text("/proc/self/oom_score_adj"),
        text("/proc/self/timerslack_ns"),
    )
    return {
        "the user or its groups": f"{status['Uid']} {status['Gid']} {sorted(os.getgroups())}",
        "the set of privileges": " ".join(status.get(name, "") for name in PRIVILEGES),
        "the set of ignored and blocked signals": f"{status['SigIgn']} {status['SigBlk']}",
        "the priority": " ".join(map(str, priorities)),
        "the set of CPUs": f"{sorted(os.sched_getaffinity(0))} {status.get('Mems_allowed')}",
        "the policy of memory": f"{text('/proc/self/personality')} {policy} {thp}",
        "what a core dump holds": text("/proc/self/coredump_filter"),
        "the control group": SESSION.sub("session", text("/proc/self/cgroup")),
    }


def io_priority() -> int:
    """Return the priority of this process's reads and writes; os has no function for it."""
    number = IOPRIO_GET.get(os.uname().machine)
    return ctypes.CDLL(None).syscall(number, IOPRIO_WHO_PROCESS, 0) if number else 0


def machine() -> str:
    """Name this machine as it was booted, and the namespaces that this process sees of it."""
    inodes = [os.stat(f"/proc/self/ns/{name}").st_ino for name in NAMESPACES]
    return " ".join([text("/proc/sys/kernel/random/boot_id"), *map(str, inodes)])


def identity(path: str) -> list[str]:
    real = os.path.realpath(path)
    status = os.stat(real)
    return [real, str(status.st_mtime_ns), str(status.st_size), sys.version.split()[0]]


def key_of(setting: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:16]


def in_words(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"{', '.join(names[:2])}{more} {'differs' if len(names) == 1 else 'differ'}"


def differences(warm: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Name what differs."""
    return sorted(name for name in {*warm, *wanted} if warm.get(name) != wanted.get(name))


def text(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
