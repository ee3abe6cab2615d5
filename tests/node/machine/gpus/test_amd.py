"""rocm-smi's JSON as ROCm 5.7 and 6 print it."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.node.machine.gpus import amd
from orchestrator.protocol.facts import Gpu, Holder
from orchestrator.protocol.message import decode, encode
from tests.node.job.trees import plant

SIX = {
    "card1": {
        "Unique ID": "0x8e6b0a5ef2a9d3c1", "GPU use (%)": "0",
        "PCI Bus": "0000:2F:00.0", "VRAM Total Memory (B)": "206141652992",
        "VRAM Total Used Memory (B)": "299032576", "Card Series": "AMD Instinct MI300X",
        "Card Model": "0x74a1", "Card Vendor": "Advanced Micro Devices, Inc. [AMD/ATI]",
        "Card SKU": "M3000100", "Subsystem ID": "0x74a1", "Device Rev": "0x00",
        "Node ID": "3", "GUID": "28851", "GFX Version": "gfx942",
    },
    "card0": {"Card Series": "N/A", "Card Model": "0x7551", "GFX Version": "gfx1201",
              "VRAM Total Memory (B)": "N/A", "GPU use (%)": "3"},
    "system": {
        "Driver version": "6.10.5",
        "PID67849": "python3, 2, 18165104640, 0, 87",
        "PID70001": "gmx_mpi, 1, UNKNOWN, UNKNOWN, UNKNOWN",
        "PID1684258": "kfd_open, 0, 0, 0, 0",
        "PID5": "a, b, 1, 4096, 0, 0",
    },
}  # fmt: skip
FIVE = '{"card0": {"Card series": "Instinct MI210", "Unique ID": "0x1", "GPU use (%)": 100}}'
WARNING = "WARNING: AMD GPU device(s) is/are in a low-power state. Check power control\n\n"


def test_gpus() -> None:
    first, second = amd.gpus(WARNING + json.dumps(SIX))
    assert second == Gpu(
        "amd", 1, "AMD Instinct MI300X", "0x8e6b0a5ef2a9d3c1", "0000:2f:00.0",
        memory=206141652992, used=299032576, busy=0,
    )  # fmt: skip
    assert (first.index, first.model, first.memory, first.busy) == (0, "gfx1201", None, 3)


def test_an_older_rocm_writes_its_keys_otherwise() -> None:
    (gpu,) = amd.gpus(FIVE)
    assert (gpu.model, gpu.busy, gpu.used) == ("Instinct MI210", 100, None)


def test_who_computes_and_who_only_looks() -> None:
    found = amd.processes(json.dumps(SIX))
    assert found == [
        Holder(67849, "", "python3", 18165104640),
        Holder(70001, "", "gmx_mpi", None),
        Holder(5, "", "a, b", 4096),
    ]
    assert amd.driver(json.dumps(SIX)) == "6.10.5"


def test_errors_of_memory(tmp_path: Path) -> None:
    top = "sys/bus/pci/devices/0000:2f:00.0/ras"
    plant(tmp_path, {
        f"{top}/umc_err_count": "ue: 2\nce: 10", f"{top}/gfx_err_count": "ue: 1\nce: 0",
        f"{top}/features": "feature mask: 0x1", f"{top}/mca_err_count": "",
    })  # fmt: skip
    assert amd.ecc_errors("0000:2f:00.0", str(tmp_path)) == 3
    assert amd.ecc_errors("0000:99:00.0", str(tmp_path)) is None


anything = st.recursive(
    st.none() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["card0", "card1", "system", "PID1", "Card Series", "GPU use (%)"]),
        inner, max_size=4,
    ),
    max_leaves=10,
)  # fmt: skip


@given(st.text(max_size=60) | anything.map(json.dumps))
@settings(deadline=None)  # a busy machine is no defect
def test_no_text_is_too_odd(text: str) -> None:
    for gpu in amd.gpus(text):
        decode(Gpu, encode(gpu))
    for holder in amd.processes(text):
        decode(Holder, encode(holder))
    amd.driver(text)
