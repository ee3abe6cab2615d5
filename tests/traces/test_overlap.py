"""Overlap: known timelines, arithmetic against counting, and real traces of two ranks over gloo."""

import gzip
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from orchestrator.common.errors import UsageError
from orchestrator.traces import timeline
from orchestrator.traces.timeline import (
    TracedRank,
    TraceEvent,
    intersect_intervals,
    merge_intervals,
    total_length,
    trace_of_rank,
)
from tests.engine import pair

pytestmark = pytest.mark.slow

# -- intervals against cells that are counted one by one ------------------------------------------

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted).map(tuple))


def cells(intervals: list[tuple[float, float]]) -> set[int]:
    return {cell for start, end in intervals for cell in range(int(start), int(end))}


@given(INTERVALS)
def test_merge_keeps_every_cell_once(intervals: list[tuple[float, float]]) -> None:
    merged = merge_intervals(intervals)
    assert cells(merged) == cells(intervals)
    assert total_length(merged) == len(cells(intervals))
    assert all(one[1] < other[0] for one, other in itertools.pairwise(merged))
    assert merge_intervals(merged) == merged


@given(INTERVALS, INTERVALS)
def test_intersect_keeps_common_cells(
    one: list[tuple[float, float]], other: list[tuple[float, float]]
) -> None:
    both = intersect_intervals(merge_intervals(one), merge_intervals(other))
    assert cells(both) == cells(one) & cells(other)
    assert merge_intervals(both) == both


def event(name: str, start: float, end: float, cat: str = "kernel", **more: Any) -> dict[str, Any]:
    """As Kineto writes it."""
    thread = more.pop("tid", 7)
    args = {"External id": 41, "stream": thread, "device": 0, "correlation": 12, **more}
    named = {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": thread}
    return {**named, "ts": start, "dur": end - start, "args": args}


def read(tmp_path: Path, *events: dict[str, Any], rank: int = 0) -> TracedRank:
    path = tmp_path / f"rank_{rank:02d}.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"schemaVersion": 1, "traceEvents": [*NOISE, *events]}, file)
    return timeline.read_trace(path)[1]


# What else a trace of a GPU holds, all of which must not count.
NOISE: list[dict[str, Any]] = [
    {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 1, "args": {"name": "python"}},
    {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 9e9, "s": "g"},
    event("cudaLaunchKernel", 0, 5000, "cuda_runtime", tid=3),
    event("nccl:all_reduce", 0, 5000, "gpu_user_annotation"),
    event("PyTorch Profiler (0)", 0, 9e6, "Trace", tid="PyTorch Profiler"),
]
ADAM = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>(...)"
REDUCE = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@given(INTERVALS.filter(bool), INTERVALS, INTERVALS)
def test_parts_add_up(
    compute: list[tuple[float, float]],
    talk: list[tuple[float, float]],
    wait: list[tuple[float, float]],
) -> None:
    events = [TraceEvent("void gemm()", "kernel", 7, *span, {}) for span in compute]
    events += [TraceEvent(GATHER, "kernel", 20, *span, {}) for span in talk]
    events += [TraceEvent("orchestrator: data", "user_annotation", 1, *span, {}) for span in wait]
    found = trace_of_rank(events)
    c, t = cells(compute), cells(talk)
    window = set(range(min(c | t), max(c | t) + 1)) if c | t else set()
    data = (cells(wait) & window) - c - t
    expected = {
        "window_ms": len(window),
        "compute_ms": len(c),
        "communication_ms": len(t),
        "overlapped_ms": len(c & t),
        "exposed_ms": len(t - c),
        "data_ms": len(data),
        "idle_ms": len(window - c - t - data),
    }
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value / 1e3), name


# -- traces of GPUs, by hand ----------------------------------------------------------------------


def test_gpu_timeline_is_divided(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        event("ProfilerStep#7", 0, 5000, "user_annotation", tid=1),
        event("ProfilerStep#8", 5000, 9000, "user_annotation", tid=1),
        event("ProfilerStep#8", 5100, 9100, "gpu_user_annotation"),
        event("aten::mm", 0, 9000, "cpu_op", tid=1),
        event("sm90_xmma_gemm_bf16", 1000, 3000),
        # This kernel is on another stream.
        event(ADAM, 2500, 4000, tid=8),
        event(GATHER, 3500, 6000, tid=20),  # 0.5 ms hidden, 2 ms exposed
        event("Memcpy HtoD (Pinned -> Device)", 5500, 7000, "gpu_memcpy", tid=21),
        event("Memset (Device)", 7000, 7500, "gpu_memset"),
        event("void at::native::vectorized_elementwise_kernel<4>()", 8000, 11000),
    )
    # The window spans the first to the last kernel.
    assert (found.steps, found.window_ms) == (2, 10)
    assert (found.compute_ms, found.communication_ms) == (6, 2.5)
    assert (found.overlapped_ms, found.exposed_ms) == (0.5, 2)
    # A GPU that only copies counts as idle.
    assert (found.data_ms, found.idle_ms) == (0, 2)
    assert found.collectives == {"AllGather": ((3.5, 6.0),)}


@pytest.mark.parametrize(
    ("name", "args", "key"),
    [
        (REDUCE, {}, "ReduceScatter"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", {}, "AllReduce"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", {}, "Generic"),
        ("ncclDevKernel_Generic_4()", {"Collective name": "allreduce"}, "allreduce"),
        (
            REDUCE,
            {"Collective name": "_reduce_scatter_base", "Process Group Name": "3"},
            "_reduce_scatter_base in group 3",
        ),
        ("rcclSomething(int)", {}, "rcclSomething"),
    ],
)
def test_collective_is_named(tmp_path: Path, name: str, args: dict[str, str], key: str) -> None:
    found = read(tmp_path, event(name, 0, 1000, **args))
    assert list(found.collectives) == [key]
    assert found.communication_ms == found.exposed_ms == 1


def test_straggler_waits_least(tmp_path: Path) -> None:
    """Four ranks in two groups. Rank 2 arrives 4 ms late each time; its partner in the group waits
    for it, and the ranks of the other group wait in the all-reduce across."""

    def rank(number: int, gather: float, reduce: float) -> TracedRank:
        group = str(number // 2)
        spans = [event("gemm", 0, 20000), event("gemm", 20000, 40000)]
        for step in (0, 20000):
            gathers = {"Collective name": "_allgather_base", "Process Group Name": group}
            spans.append(event(GATHER, step + 10000 - 1000 * gather, step + 10000, **gathers))
            spans.append(event("ncclDevKernel_AllReduce()", step + 15000 - 1000 * reduce, step))
            spans[-1]["dur"] = 1000 * reduce
        spans += [event(f"ProfilerStep#{n}", 0, 1, "user_annotation") for n in (1, 2)]
        return read(tmp_path, *spans, rank=number)

    ranks = {0: rank(0, 1, 5), 1: rank(1, 1, 5), 2: rank(2, 1, 1), 3: rank(3, 5, 1)}
    found = timeline.compare_ranks(ranks)
    assert found.waited_ms == pytest.approx({0: 4, 1: 4, 2: 0, 3: 4})
    assert found.straggler == 2
    assert found.lag_ms == pytest.approx(4)
    text = timeline.overlap_to_text(found)
    assert "rank 2 is slowest: others wait 4 ms per step for it" in text
    assert [line.split()[-1] for line in text.splitlines()[1:5]] == ["4.0", "4.0", "slowest", "4.0"]
    data = json.loads(json.dumps(timeline.overlap_as_data(found)))
    assert data["straggler"] == 2 and data["lag_ms_per_step"] == pytest.approx(4)
    assert data["ranks"]["3"]["waited_ms_per_step"] == pytest.approx(4)
    assert "collectives" not in data["ranks"]["3"]


def test_ranks_that_wait_in_turn_are_equal(tmp_path: Path) -> None:
    one = read(tmp_path, event(GATHER, 0, 5000), event(GATHER, 8000, 9000))
    other = read(tmp_path, event(GATHER, 4000, 5000), event(GATHER, 5500, 9000))
    found = timeline.compare_ranks({0: one, 1: other})
    assert found.waited_ms == pytest.approx({0: 4, 1: 2.5})
    assert found.straggler is None
    assert timeline.describe_overlap(found).endswith("no rank is slower than the others")


def test_unequal_counts_are_not_compared(tmp_path: Path) -> None:
    one = read(tmp_path, event(GATHER, 0, 10), event(GATHER, 20, 9000), event(REDUCE, 0, 10))
    other = read(tmp_path, event(GATHER, 0, 10), event(REDUCE, 0, 10))
    found = timeline.compare_ranks({0: one, 1: other})
    assert found.unmatched == ("AllGather",)
    assert (found.straggler, found.waited_ms) == (None, {0: 0, 1: 0})
    assert "not compared: AllGather" in timeline.overlap_to_text(found)


def test_text_without_communication_says_so(tmp_path: Path) -> None:
    alone = timeline.compare_ranks({0: read(tmp_path, event("gemm", 0, 1000))})
    assert timeline.overlap_to_text(alone, {0: "gpu01"}).splitlines() == [
        "rank       step  computing  exposed comm       data       idle     waited  ms per step",
        "   0        1.0        1.0           0.0        0.0        0.0        0.0  gpu01",
        "no communication was seen",
    ]
    empty = timeline.compare_ranks({0: read(tmp_path)})
    assert timeline.overlap_as_data(empty)["ranks"]["0"]["window_ms"] == 0


# -- traces of CPUs, by hand ----------------------------------------------------------------------


def test_wait_within_operation_is_not_compute(tmp_path: Path) -> None:
    """A node of the autograd graph starts a collective and waits for it in Python: only what is
    nested in it, and known to compute, counts."""
    cpu = {"cat": "cpu_op", "tid": 1}
    found = read(
        tmp_path,
        event("ProfilerStep#3", 0, 10000, "user_annotation", tid=1),
        event("aten::linear", 0, 2000, **cpu),
        event("aten::addmm", 100, 1900, **cpu),
        event("autograd::engine::evaluate_function: SomeBackward", 2000, 9000, **cpu),
        event("aten::cat", 2000, 2500, **cpu),
        event("c10d::_reduce_scatter_base_", 3000, 3100, **cpu),
        event("aten::div_", 8000, 8500, **cpu),
        event("_c10d_functional::wait_tensor", 9000, 9500, **cpu),
        event("aten::detach", 9100, 9200, **cpu),
        event("aten::mul", 9500, 11000, **cpu),  # half of it after the last step
        event("gloo:all_reduce", 3050, 8000, "user_annotation", tid=2),
        event("aten::copy_", 3100, 7000, "cpu_op", tid=2),
    )
    assert found.window_ms == 10
    assert found.compute_ms == pytest.approx(2 + 0.5 + 0.5 + 0.5)
    assert found.exposed_ms == found.communication_ms == pytest.approx(4.95)
    assert found.idle_ms == pytest.approx(10 - 3.5 - 4.95)


# -- real traces ----------------------------------------------------------------------------------

NAP = 1.0  # seconds: more than what a busy machine adds to a step of one rank


def trace(rank: int, directory: Path) -> None:
    """Rank 1 sleeps in every step."""
    for way in ("fsdp", "ddp"):
        model: nn.Module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
        if way == "fsdp":
            mesh = init_device_mesh("cpu", (2,))
            for layer in model.children():
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        else:
            model = DistributedDataParallel(model, bucket_cap_mb=0.2)
        sgd = torch.optim.SGD(model.parameters())
        model(torch.randn(8, 256)).sum().backward()  # set-up
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as traced:
            for _ in range(2):
                time.sleep(NAP * rank)
                model(torch.randn(256, 256)).square().mean().backward()
                sgd.step()
                sgd.zero_grad()
                traced.step()
        traced.export_chrome_trace(str(directory / f"{way}_{rank}.json"))


def test_sleeping_rank_of_real_job_is_named(tmp_path: Path) -> None:
    pair.run(trace, tmp_path)
    for way in ("fsdp", "ddp"):
        paths = {rank: tmp_path / f"{way}_{rank}.json" for rank in (0, 1)}
        found = timeline.compare_ranks(
            {rank: timeline.read_trace(path)[1] for rank, path in paths.items()}
        )
        assert found.straggler == 1, way
        assert not found.unmatched
        assert found.waited_ms[0] > NAP * 1e3 * 0.6
        fast, slow = found.ranks[0], found.ranks[1]
        for rank in (fast, slow):
            parts = rank.compute_ms + rank.exposed_ms + rank.data_ms + rank.idle_ms
            assert parts == pytest.approx(rank.window_ms)
            assert rank.overlapped_ms + rank.exposed_ms == pytest.approx(rank.communication_ms)
            assert rank.compute_ms > 0
        # Neither waiting nor sleeping is compute, however slow this machine may be.
        assert fast.exposed_ms > NAP * 1e3
        assert slow.idle_ms > NAP * 1e3


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": 3}', "\x1f\x8b", '{"ph": "X"}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    for name in ("a.json", "a.json.gz"):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(UsageError, match="is not a Chrome trace"):
            timeline.read_trace(path)
