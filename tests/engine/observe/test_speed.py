"""Speed: a figure for a device that is known by its whole name, none for any other."""

import re
import time

import pytest
import torch

from orchestrator.engine.observe import speed


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 80GB HBM3", "tf32", 494),
        ("NVIDIA H100 80GB HBM3", "fp32", 67),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835),
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H200 NVL", "bf16", 835),
        ("NVIDIA H20", "bf16", 148),
        ("NVIDIA GH200 480GB", "bf16", 989),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GB200", "fp16", 2500),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312),
        # An older driver names it so.
        ("A100-SXM4-40GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "bf16", 312),
        ("NVIDIA A100-PCIE-40GB", "tf32", 156),
        ("NVIDIA A800-SXM4-80GB", "bf16", 312),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA A40", "bf16", 149.7),
        ("NVIDIA A30", "bf16", 165),
        ("NVIDIA RTX A6000", "bf16", 154.8),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40", "bf16", 181),
        ("NVIDIA L40S", "bf16", 362),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("Tesla T4", "fp16", 65),
        ("Tesla T4", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 3090", "bf16", 71),
        ("AMD Instinct MI300X", "bf16", 1307),
        ("AMD Instinct MI300X OAM", "bf16", 1307),
        ("AMD Instinct MI325X", "bf16", 1307),
        ("AMD Instinct MI250X", "bf16", 191.5),
    ],
)
def test_peak_flops_match_vendor(name: str, dtype: str, tera: float | None) -> None:
    expected = None if tera is None else pytest.approx(tera * 1e12)
    assert speed.peak_flops(name, dtype) == expected


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA",
        "NVIDIA H100",
        "NVIDIA H2000",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        # Leonardo has this variant, with more of the chip enabled.
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A1000",
        "NVIDIA RTX A1000 Laptop GPU",
        "NVIDIA A2",
        "NVIDIA B2000",
        "NVIDIA L400",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        # This is a part of a GPU, or all of it.
        "AMD Instinct MI300X VF",
        "AMD Instinct MI300",
        "AMD Radeon RX 7900 XTX",
        "GRID A100X-40C",
        "Some Future GPU",
    ],
)
def test_peak_flops_of_unknown_device_is_none(name: str) -> None:
    assert [speed.peak_flops(name, dtype) for dtype in ("bf16", "fp16", "fp32")] == [None] * 3


def test_device_name_matches_one_row() -> None:
    for name in ("H200", "H20", "H20-3e", "L4", "L40", "L40S", "A10", "A10G", "A100-SXM4-80GB"):
        rows = [row for row in speed.DEVICES if re.fullmatch(row, name)]
        assert len(rows) == 1, (name, rows)


def test_peak_flops_has_no_fp8() -> None:
    assert speed.peak_flops("NVIDIA H200", "fp8") is None


def test_matmul_dtype_follows_precision_and_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert speed.matmul_dtype("bf16") == "bf16"
    assert speed.matmul_dtype("fp32") == "fp32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert speed.matmul_dtype("fp32") == "fp32"
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert speed.matmul_dtype("fp32") == "tf32"
    assert speed.matmul_dtype("bf16") == "bf16"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_measured_matmul_flops_is_quick(dtype: str) -> None:
    began = time.perf_counter()
    found = speed.measured_matmul_flops(torch.device("cpu"), dtype)
    assert 1e7 < found < 1e14
    # It takes 0.2 s on an idle machine.
    assert time.perf_counter() - began < 20
