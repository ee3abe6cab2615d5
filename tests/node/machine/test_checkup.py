"""The checkup with tools that print what the real ones do, and with none."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.node.job import processes
from orchestrator.node.machine import checkup
from orchestrator.protocol.facts import Checkup, Torch
from orchestrator.protocol.message import decode_value, encode_value
from orchestrator.protocol.requests.machine import Examine
from tests.node.job.trees import plant
from tests.node.machine.test_nvidia import HEALTHY, LOST, UUID

SMI = f"""#!/bin/sh
case "$1" in
*query-compute-apps=*) echo "$PPID, {UUID}, 512, python3";;
*) cat <<'END'
{HEALTHY}END
esac
"""
DMESG = "#!/bin/sh\necho '[ 9.1] NVRM: Xid (PCI:0000:43:00): 48, pid=1, DBE'\n"


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of tools that stand before the machine's own."""
    directory = tmp_path / "tools"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    return directory


def tool(directory: Path, name: str, text: str) -> None:
    (directory / name).write_text(text)
    (directory / name).chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The root of one with NVIDIA's driver."""
    plant(tmp_path, {"root/dev/nvidiactl": "", "root/dev/nvidia0": ""})
    return tmp_path / "root"


def look(root: Path | str = "", **request: Any) -> Checkup:
    found = checkup.run_checkup(Examine(**{"workdir": "/", **request}), str(root))
    assert decode_value(Checkup, json.loads(json.dumps(encode_value(found)))) == found
    return found


def test_gpus_holders_and_xids_are_found(tools: Path, machine: Path) -> None:
    tool(tools, "nvidia-smi", SMI)
    tool(tools, "dmesg", DMESG)
    found = look(machine, parts=["gpus", "xids"])
    assert found.gpus is not None and found.holders is not None and found.xids is not None
    first, second = found.gpus
    assert (first.pcie_width, first.pcie_width_most, first.rows_failed) == (8, 16, False)
    assert (second.pcie_width, second.ecc_errors) == (16, 2)
    (holder,) = found.holders
    assert (holder.name, holder.used) == ("python3", 512 << 20)
    # The process exists, so its user is known.
    assert holder.user
    assert [(xid.pci, xid.xid) for xid in found.xids] == [("0000:43:00", 48)]
    assert found.problems == {}
    assert (found.torch, found.names) == (None, None)


def test_missing_nvidia_smi_is_reported(tools: Path, machine: Path) -> None:
    tool(
        tools,
        "dmesg",
        "#!/bin/sh\necho 'dmesg: read kernel buffer failed: not permitted' >&2; exit 1",
    )
    tool(tools, "journalctl", "#!/bin/sh\necho 'No journal files were opened' >&2; exit 1")
    found = look(machine, parts=["gpus", "xids"])
    assert (found.gpus, found.holders, found.xids) == (None, None, ())
    assert found.problems["gpus"] == "nvidia-smi is not installed"
    assert "not permitted" in found.problems["xids"] and "No journal" in found.problems["xids"]


def test_gpus_of_driver_files_have_unknown_holders(tools: Path, machine: Path) -> None:
    files = {"information": "Model: \t NVIDIA H100\nGPU UUID: \t GPU-7\n"}
    plant(machine, {f"proc/driver/nvidia/gpus/0000:01:00.0/{n}": t for n, t in files.items()})
    found = look(machine, parts=["gpus"])
    assert [(gpu.index, gpu.model, gpu.uuid) for gpu in found.gpus or ()] == [
        (0, "NVIDIA H100", "GPU-7")
    ]
    assert found.holders is None and "not installed" in found.problems["gpus"]


def test_journal_replaces_unreadable_kernel_log(tools: Path, machine: Path) -> None:
    tool(tools, "dmesg", "#!/bin/sh\nexit 1")
    # Grep exits in this way without a match.
    tool(tools, "journalctl", "#!/bin/sh\nexit 1")
    assert "xids" not in look(machine, parts=["xids"]).problems
    tool(tools, "journalctl", DMESG)
    assert len(look(machine, parts=["xids"]).xids or ()) == 1


def test_broken_driver_is_reported(tools: Path, machine: Path) -> None:
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    tool(tools, "nvidia-smi", f'#!/bin/sh\necho "{said}"; exit 9\n')
    assert look(machine, parts=["gpus"]).problems == {
        "gpus": f"nvidia-smi ended with exit code 9: {said}"
    }
    tool(tools, "nvidia-smi", SMI.replace("END\nesac", f"{LOST}END\nesac"))
    found = look(machine, parts=["gpus"])
    assert len(found.gpus or ()) == 2
    assert found.problems == {"gpus": LOST.strip()}


def test_amd_gpus_are_read_from_driver_files(tools: Path, tmp_path: Path) -> None:
    device = {"vendor": "0x1002", "mem_info_vram_total": "100", "mem_info_vram_used": "7"}
    plant(tmp_path, {f"sys/class/drm/card0/device/{name}": text for name, text in device.items()})
    found = look(tmp_path, parts=["gpus"])
    (gpu,) = found.gpus or ()
    assert (gpu.vendor, gpu.memory, gpu.used) == ("amd", 100, 7)
    assert found.problems == {}


# -- code and torch ---------------------------------------------------------------------------


def test_script_has_digest(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("x = 1\n")
    found = look(workdir=str(tmp_path), script="train.py", parts=["code"])
    assert found.script and len(found.script) == 64
    assert found.problems == {}
    assert look(workdir=str(tmp_path), script="gone.py", parts=["code"]).script == ""
    sent_later = look(workdir=str(tmp_path / "none"), script="train.py", parts=["code"])
    assert sent_later.problems == {}


@pytest.mark.slow
def test_torch_is_imported_for_real() -> None:
    found = look(parts=["torch", "names"])
    import torch

    assert isinstance(found.torch, Torch)
    assert found.torch.error == ""
    assert found.torch.available == torch.cuda.is_available()
    assert found.names is not None


def test_broken_torch_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = "print('noise'); raise ImportError('libcudart.so.12: no such file')"
    plant(tmp_path, {"torch/__init__.py": broken})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = look(parts=["torch"])
    assert found.torch is not None
    assert found.torch.error == "ImportError: libcudart.so.12: no such file"
    assert found.problems == {"torch": found.torch.error}


# -- who uses the processors ------------------------------------------------------------------

SPIN = "print(flush=True)\nwhile True: pass"
WAIT = "import signal; print(flush=True); signal.pause()"


@contextmanager
def program(text: str, job: str = "") -> Iterator[int]:
    environment = {**os.environ, "ORCHESTRATOR_JOB": job}
    with subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def test_load_names_busy_and_idle_jobs() -> None:
    begun = time.time()
    with program(SPIN, "spins-1") as busy, program(WAIT, "waits-1") as idle:
        found = checkup.load_of_users(1.0)["load"]
    by_job = {user.job: user for user in found.users}
    assert by_job["spins-1"].pid == busy and by_job["waits-1"].pid == idle
    assert by_job["waits-1"].cores < by_job["spins-1"].cores <= found.cores
    assert by_job["waits-1"].memory > 1 << 20
    # Start times are counted in ticks since the boot.
    assert begun - 1.0 < by_job["spins-1"].since < time.time()
    assert list(found.users) == sorted(found.users, key=lambda user: -user.cores)


def test_load_counts_unseen_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with program(SPIN):
        monkeypatch.setattr(checkup.processes, "all_processes", dict)
        found = checkup.load_of_users(0.5)["load"]
    assert not found.users and found.unseen > 0.05 and found.cores == found.unseen


def test_time_of_ended_children_counts_with_their_ancestor() -> None:
    # The last two numbers are the time of a process, and that of the children it waited for.
    before = {
        1: processes.Process(1, 1, 0, "S", "sh", 5, 10),
        2: processes.Process(2, 1, 1, "S", "make", 100, 50),
        3: processes.Process(3, 1, 2, "S", "cc", 7),
        4: processes.Process(4, 1, 1, "S", "cc", 40),
    }
    # 3 has used 2 more, 2 and 1 have used 1, and one that no look has seen 20. 4 is another now.
    after = {
        1: processes.Process(1, 1, 0, "S", "sh", 6, 10 + (101 + 50 + 9) + 40 + 20),
        4: processes.Process(4, 9, 1, "S", "ls", 3),
    }
    assert checkup.ticks_between(before, after) == {1: 2 + 1 + 1 + 20, 4: 3}


def test_owner_of_ended_process_is_none() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert checkup.owner_of_process(process.pid) is None
    own = processes.find_process(os.getpid())
    assert own is not None and time.time() - 86400 < processes.start_time(own) < time.time()
