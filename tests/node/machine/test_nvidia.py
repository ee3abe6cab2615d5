"""nvidia-smi's output as drivers 470 to 570 print it, healthy and sick; the kernel's Xid lines."""

import os
from pathlib import Path

import pytest

from orchestrator.node.machine import nvidia
from orchestrator.protocol.facts import Gpu, Holder

UUID = "GPU-6c35a82c-6ee1-5a9b-1b5a-2f6f7ad4f9a1"
HEALTHY = f"""\
0, {UUID}, NVIDIA H100 80GB HBM3, 00000000:1B:00.0, 81559, 4, 0, 31, 550.127.05, 0, No, 0, 0, 8, 16
1, GPU-0b1c2d3e-4f50-6172-8394-a5b6c7d8e9f0, NVIDIA H100 80GB HBM3, 00000000:43:00.0, 81559, \
77013, 100, 64, 550.127.05, 2, [N/A], Yes, 1, 16, 16
"""
GEFORCE = (
    f"0, {UUID}, NVIDIA GeForce RTX 4090, 00000000:01:00.0, 24564, 1, 0, 35, 535.183.01, "
    "[N/A], [N/A], [N/A], [N/A], 16, 16\n"
)
MIG = (
    f"0, {UUID}, NVIDIA A100-SXM4-40GB, 00000000:07:00.0, 40960, [Insufficient Permissions], "
    "[N/A], 30, 535.161.08, 0, No, 0, 0, 16, 16\n"
)
SICK = (
    f"3, {UUID}, NVIDIA H100 80GB HBM3, 00000000:BA:00.0, 81559, 0, [GPU requires reset], "
    "[GPU requires reset], 550.127.05, 0, No, 0, 0, 16, 16\n"
)
ERR = (
    f"4, {UUID}, ERR!, 00000000:BB:00.0, ERR!, ERR!, ERR!, ERR!, 550.127.05, ERR!, "
    "ERR!, ERR!, ERR!, ERR!, ERR!\n"
)
LOST = "Unable to determine the device handle for GPU0000:CA:00.0: Unknown Error\n"
GONE = (
    "Unable to determine the device handle for GPU 0000:4F:00.0: GPU is lost.  "
    "Reboot the system to recover this GPU\n"
)


def gpus(text: str) -> list[Gpu]:
    return nvidia.gpus_of_rows(nvidia.parse_rows(text, nvidia.GPU_FIELDS))


def test_healthy_gpus_are_parsed() -> None:
    first, second = gpus(HEALTHY)
    assert first == Gpu(
        vendor="nvidia", index=0, model="NVIDIA H100 80GB HBM3", uuid=UUID, pci="0000:1b:00",
        memory=81559 << 20, used=4 << 20, busy=0, temperature=31, driver="550.127.05", ecc_errors=0,
        pages_pending=False, rows_pending=False, rows_failed=False,
        pcie_width=8, pcie_width_most=16,
    )  # fmt: skip
    assert (second.used, second.busy, second.ecc_errors) == (77013 << 20, 100, 2)
    assert (second.pages_pending, second.rows_pending, second.rows_failed) == (None, True, True)


@pytest.mark.parametrize(
    ("text", "errors", "used"),
    [(GEFORCE, None, 1 << 20), (MIG, 0, None)],
    ids=["a card without ECC", "MIG"],
)
def test_unsupported_fields_are_none(text: str, errors: int | None, used: int | None) -> None:
    (gpu,) = gpus(text)
    assert (gpu.ecc_errors, gpu.used) == (errors, used)
    assert gpu.problem == "" and gpu.memory


def test_sick_gpu_has_problem() -> None:
    (gpu,) = gpus(SICK)
    assert gpu.problem == "nvidia-smi says 'GPU requires reset' for its utilization.gpu"
    assert (gpu.index, gpu.busy, gpu.temperature, gpu.memory) == (3, None, None, 81559 << 20)
    (broken,) = gpus(ERR)
    assert broken.problem == "nvidia-smi says 'ERR!' for its name"
    assert (broken.model, broken.memory) == ("", None)


@pytest.mark.parametrize("message", [LOST, GONE])
def test_lost_gpu_is_reported_beside_others(message: str) -> None:
    assert [gpu.index for gpu in gpus(HEALTHY + message)] == [0, 1]
    assert nvidia.lost_gpus(HEALTHY + message) == [message.strip()]
    assert nvidia.lost_gpus(HEALTHY) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "No devices were found\n",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure "
        "that the latest NVIDIA driver is installed and running.\n",
        "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.127",
    ],
)
def test_messages_are_no_gpus(text: str) -> None:
    assert gpus(text) == []


def test_processes_are_parsed() -> None:
    text = f"""\
67849, {UUID}, 76842, /home/alice/venv/bin/python3
70001, {UUID}, [N/A], [Insufficient Permissions]
70002, {UUID}, 3, python3 -c print(1, 2, 3)
70003, {UUID}, 12, [Not Found]
No running processes found
"""
    found = nvidia.processes_of_rows(nvidia.parse_rows(text, nvidia.APP_FIELDS))
    assert found == [
        Holder(67849, UUID, "/home/alice/venv/bin/python3", 76842 << 20),
        Holder(70001, UUID, "", None),
        Holder(70002, UUID, "python3 -c print(1, 2, 3)", 3 << 20),
        Holder(70003, UUID, "", 12 << 20),
    ]


def test_xids_are_read_from_kernel_log_and_journal() -> None:
    text = """\
[    4.1] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.127.05
[  812.1] NVRM: Xid (PCI:0000:3b:00): 31, pid=79749, name=python3, Ch 0000000a, intr 00000000.
[  900.0] NVRM: Xid (PCI:0000:3b:00): 31, pid=80001, name=python3, Ch 0000000b, intr 00000000.
Nov 03 01:02:03 gpu07 kernel: NVRM: Xid (PCI:0000:4F:00): 79, GPU has fallen off the bus.
[ 1000.0] NVRM: Xid (0000:05:00): 62, 1d9c(25e8) 00000000 00000000
"""
    found = nvidia.find_xids(text)
    assert [(one.pci, one.xid, one.count) for one in found] == [
        *(("0000:3b:00", 31, 2), ("0000:4f:00", 79, 1)),
        ("0000:05:00", 62, 1),
    ]
    assert "80001" in found[0].words
    assert found[1].words == "GPU has fallen off the bus."


def test_program_named_like_xid_is_ignored() -> None:
    name = "NVRM: Xid (PCI:0000:4f:00): 79, GPU has fallen off the bus"
    crashed = "segfault at 0 ip 0000560bb3fca132 sp 00007ffe321a2a80 error 6 in"
    told = [
        f"{name[:15]}[13266]: {crashed} {name}[1132,560bb3fca000+1000] likely on CPU 0",
        rf"x\x0a{name[:13]}[13266]: {crashed} x\x0a{name}[1132,560bb3fca000+1000]",
        f"x\n               {name[:13]}[13266]: {crashed} x\n               {name}[1132]",
        f"traps: {name[:15]}[13266] trap invalid opcode ip:7f sp:7f error:0 in {name}[7f+1]",
    ]
    for before in ("6,44854,25755496178,-;", "[25755.496178] ", "Nov 03 01:02:03 gpu07 kernel: "):
        assert nvidia.find_xids("\n".join(before + line for line in told)) == []
        assert len(nvidia.find_xids(before + name)) == 1
    assert len(nvidia.find_xids(f"[25755.496178][ T1234] {name}")) == 1
    assert len(nvidia.find_xids(f"6,44854,25755496178,-,caller=T1;{name}")) == 1


# -- samples ----------------------------------------------------------------------------------

H100 = "NVIDIA H100 80GB HBM3"
# An older driver, which does not know all fields.
SMI = f"""#!/bin/sh
case "$*" in *ecc.errors.corrected*)
    echo 'Field "ecc.errors.corrected.volatile.total" is not a valid field to query.'; exit 2;; esac
echo "1, {H100}, 00000000:4F:00.0, 12, 1, 81559, 45, 120.12, 700.00, 1980, 2619, 0x0, [N/A]"
echo "0, {H100}, 00000000:19:00.0, 97, 60123, 81559, 88, 650.12, 700.00, 1200, 2619, 0x40, 0"
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi, which a test may replace."""
    (tmp_path / "bin").mkdir()
    (path := tmp_path / "bin/nvidia-smi").write_text(SMI)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return path


def test_unknown_fields_are_asked_once(smi: Path) -> None:
    sampling = nvidia.NvidiaSampling()
    known = {
        "use": [0.97, 0.12],
        "memory_bytes": [60123 << 20, 1 << 20],
        "memory_total_bytes": [81559 << 20] * 2,
        "celsius": [88, 45],
        "watts": [650.12, 120.12],
        "watts_most": [700, 700],
        "mhz": [1200, 1980],
        "memory_mhz": [2619, 2619],
        "throttle": [0x40, 0],
        "ecc_uncorrected": [0, None],
    }
    assert sampling.sample() == known
    assert sampling.models == [H100, H100] and not sampling.problem
    # The facts use the same spelling.
    assert sampling.places == ["0000:19:00", "0000:4f:00"]
    smi.write_text(SMI.replace("echo 'Field", "exit 9; echo 'Field"))
    assert sampling.sample() == known, "the unknown field was asked for again"


def test_failing_nvidia_smi_is_not_asked_again_at_once(smi: Path) -> None:
    smi.write_text("#!/bin/sh\necho broken; exit 9\n")
    sampling = nvidia.NvidiaSampling()
    assert sampling.sample() == {} and "exit code 9: broken" in sampling.problem
    smi.unlink()
    assert sampling.sample() == {} and "broken" in sampling.problem


def test_lost_gpu_keeps_its_index(smi: Path, tmp_path: Path) -> None:
    for index in range(3):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{index}:00.0").mkdir(parents=True)
    sampling = nvidia.NvidiaSampling(str(tmp_path))
    assert sampling.sample()["use"] == [0.97, 0.12, None]
    assert sampling.models == [H100, H100, ""]
    assert sampling.places == ["0000:19:00", "0000:4f:00", ""]


@pytest.mark.parametrize(
    ("word", "found"),
    [("12", 12), ("12.50", 12.5), ("[N/A]", None), ("0x0000000000000040", 64), ("ERR!", None)],
)
def test_scaled_parses_nvidia_smi_values(word: str, found: float | None) -> None:
    assert nvidia.scaled_number(word, 1) == found
