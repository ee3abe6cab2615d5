import random
from typing import Any

import pytest

from orchestrator.head.follow import failure_kinds, verdict
from orchestrator.head.follow.verdict import (
    Failure,
    conclude_verdict,
    find_cause,
    stopped_verdict,
    unstarted_verdict,
    verdict_to_lines,
)
from orchestrator.protocol.events import Ended, RankEnded
from orchestrator.protocol.message import decode_value
from orchestrator.records.outcome import Cause, JobVerdict


def of_rank(node: int, name: str, event: dict[str, Any], time: float) -> Failure:
    """Judge an event as the supervisor writes it; "words" are what the rank gave to sys.exit.

    `time` is that of the event by the head's clock.
    """
    fields = dict(event)
    words, ahead = fields.pop("words", ""), fields["time"] - time
    return verdict.failure_of_rank(node, name, decode_value(RankEnded, fields, ahead=ahead), words)


def of_torchrun(node: int, name: str, event: dict[str, Any], time: float) -> Failure:
    fields = {"time": time, "why": "", "ranks": {}, "killed": {}, "left": [], **event}
    return verdict.failure_of_torchrun(node, name, decode_value(Ended, fields))


def ended(code: int, error: dict[str, Any] | None = None, rank: int = 3) -> dict[str, Any]:
    return {"rank": rank, "local": 0, "pid": 1, "code": code, "error": error, "time": 1000.0}


def verdict_of(failures: list[Failure], ended_badly: int) -> JobVerdict:
    found = conclude_verdict(failures, ended_badly)
    assert found is not None
    return found


def error(message: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "ValueError",
        "message": message,
        "traceback": f"Traceback ...\nValueError: {message}\n",
        "time": 999.5,
        "file": "/w/train.py",
        "line": 12,
        "function": "step",
        **fields,
    }


# -- one rank ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        (3, "exit", "ended with exit code 3"),
        (-9, "signal", "killed by signal 9 (SIGKILL)"),
        (-11, "signal", "killed by signal 11 (SIGSEGV)"),
        (-34, "signal", "killed by signal 34 (SIGRTMIN)"),
        (-50, "signal", "killed by signal 50 (unknown)"),
    ],
)
def test_of_rank_reads_exit_without_exception(code: int, kind: str, message: str) -> None:
    failure = of_rank(1, "gpu02", ended(code), 50.0)
    assert (failure.kind, failure.message, failure.time) == (kind, message, 50.0)
    assert failure.who == "rank 3 on node 1 (gpu02)"
    assert not failure.echo


def test_of_rank_reads_users_line_and_time() -> None:
    """Its time, by the head's clock: the node's is half an hour off, the report came later."""
    failure = of_rank(0, "a", ended(1, error("no batch")), time=1000.0 - 1800.0)
    assert (failure.kind, failure.message) == ("exception", "ValueError: no batch")
    assert failure.where == "/w/train.py:12 in step"
    assert failure.time == pytest.approx(1000.0 - 1800.0 - 0.5)
    assert failure.traceback.startswith("Traceback")
    left = of_rank(0, "a", {**ended(1, error("1", type="SystemExit")), "words": "1"}, 1000.0)
    assert (left.kind, left.message) == (
        "exit",
        "ended with exit code 1",
    ) and "sys.exit" in left.fix
    assert left.where == "/w/train.py:12 in step"


def test_of_rank_strips_terminal_colours() -> None:
    """A page, a notice and job.json would have them as `[31m`."""
    red = "\x1b[31mno batch\x1b[0m\nof \x1b[1mthis\x1b[0m epoch"
    failures = [
        of_rank(0, "a", ended(1, error(red), rank=3), 1000.0),
        of_rank(0, "a", ended(1, error(f"{red}, 2"), rank=2), 1000.5),
    ]
    found = verdict_of(failures, 2)
    assert found.message == "ValueError: no batch\nof this epoch"
    assert [each.message for each in found.also] == ["ValueError: no batch"]


SPAWNED = """

-- Process 0 terminated with the following error:
Traceback (most recent call last):
  File "/p/torch/multiprocessing/spawn.py", line 1, in _wrap
    fn(i, *args)
ValueError: bad batch
"""
UNREAD = "FileNotFoundError: [Errno 2] No such file or directory: 'out/__2_0.distcp'"
CHECKPOINT = f"""CheckpointException ranks:dict_keys([2, 3])
Traceback (most recent call last): (RANK 2)
  File "/p/site-packages/torch/distributed/checkpoint/utils.py", line 193, in reduce_scatter
    local_data = map_fun()
{UNREAD}
"""
WORKER_TRACE = """Traceback (most recent call last):
  File "/p/torch/utils/data/_utils/signal_handling.py", line 73, in handler
    _error_if_any_worker_fails()
RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.\x20

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/p/torch/utils/data/dataloader.py", line 1297, in _try_get_data
    raise RuntimeError(
RuntimeError: DataLoader worker (pid(s) 7, 9) exited unexpectedly
"""
GROUP_TRACE = """  + Exception Group Traceback (most recent call last):
  |   File "/w/train.py", line 3, in <module>
  |     asyncio.run(main())
  | ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/w/train.py", line 9, in fetch
    |     raise KeyError("lr")
    | KeyError: 'lr'
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "/w/train.py", line 11, in other
    |     1 / 0
    | ZeroDivisionError: division by zero
    +------------------------------------
"""


@pytest.mark.parametrize(
    ("fields", "message", "fix"),
    [
        ({"type": "ProcessRaisedException", "message": SPAWNED},
         "ProcessRaisedException: ValueError: bad batch", "fix spawn.py:1"),
        ({"type": "CheckpointException", "message": CHECKPOINT},
         "CheckpointException: CheckpointException ranks:dict_keys([2, 3]): " + UNREAD,
         "on a disk that all nodes share"),
        ({"type": "ExceptionGroup", "traceback": GROUP_TRACE,
          "message": "unhandled errors in a TaskGroup (2 sub-exceptions)"},
         "ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions): KeyError: 'lr'",
         "fix train.py:12"),
        ({"type": "RuntimeError", "message": "\nsaid below"}, "RuntimeError: said below", "fix"),
        ({"type": "RuntimeError",
          "message": "DataLoader worker (pid 7) is killed by signal: Killed. "},
         "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ", "lack of memory"),
        ({"type": "RuntimeError", "traceback": WORKER_TRACE,
          "message": "DataLoader worker (pid(s) 7, 9) exited unexpectedly"},
         "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed", "lack of memory"),
        ({"type": "EOFError", "message": "EOF when reading a line"},
         "EOFError: EOF when reading a line", "ranks have no standard input"),
        ({"type": "BdbQuit", "message": ""}, "BdbQuit", "ranks have no standard input"),
        ({"type": "ImportError",
          "message": "attempted relative import with no known parent package"},
         "ImportError: attempted relative import with no known parent package",
         "launch it as a module, `-m"),
        ({"type": "RuntimeError", "message": "got mixed torch.Tensor and DTensor"},
         "RuntimeError: got mixed torch.Tensor and DTensor", "trainer.save(PATH)"),
        ({"type": "FileNotFoundError", "message": "[Errno 2] No such file: 'scontrol'"},
         "FileNotFoundError: [Errno 2] No such file: 'scontrol'", "MASTER_ADDR"),
        ({"type": "ValueError", "message": "Can't find a valid checkpoint at /a/checkpoint-30"},
         "ValueError: Can't find a valid checkpoint at /a/checkpoint-30", "orchestrator push"),
    ],
)  # fmt: skip
def test_of_rank_explains_terse_exception(fields: dict[str, Any], message: str, fix: str) -> None:
    failure = of_rank(0, "a", ended(1, error(**{"message": "", **fields})), 1000.0)
    assert failure.message == message
    told = verdict_of([failure], 1)
    assert fix in told.fix


def test_verdict_uses_fix_of_trainer_error() -> None:
    what, fix = "ckpt holds step 20 of another run", "resume=True goes on from it"
    trace = f"Traceback ...\norchestrator.common.errors.UsageError: {what}\n  {fix}\n"
    own = error(f"{what}\n  {fix}\x1b[2J", type="UsageError", traceback=trace)
    told = verdict_of([of_rank(0, "a", ended(1, own), 1000.0)], 1)
    assert told.message == what and told.fix.startswith(fix) and "\x1b" not in told.fix
    other = error(f"{what}\n  {fix}", type="UsageError")  # a program's own class of that name
    told = verdict_of([of_rank(0, "a", ended(1, other), 1000.0)], 1)
    assert told.fix == "fix train.py:12"


def test_missing_module_is_blamed_on_all_nodes_or_one() -> None:
    missing = error("No module named 'einops'", type="ModuleNotFoundError")
    first, second = (of_rank(n, "a", ended(1, missing, rank=n), 1000.0 + n) for n in (0, 1))
    everywhere, alone = verdict_of([first, second], 2), verdict_of([first], 2)
    assert "`orchestrator bootstrap torch numpy einops`" in everywhere.fix
    # No machine is at fault.
    assert everywhere.kind == "exception"
    assert alone.fix.startswith("einops is missing there, if nowhere else: `")
    assert "like the others" not in alone.fix and alone.kind == "environment"


def test_of_rank_reads_traceback_printed_by_child() -> None:
    lines = ["Traceback (most recent call last):", '  File "/w/train.py", line 9, in <module>']
    lines += ["    f()", "AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'"]
    said = "".join(f"[rank1]: {line}\n" for line in lines)
    failure = of_rank(0, "a", {**ended(1), "said": said}, 1000.0)
    assert failure.message == f"ended with exit code 1, after {lines[-1]}"
    assert failure.where == "/w/train.py:9 in <module>" and failure.kind == "environment"
    told = verdict_of([failure], 1)
    assert "built without CUDA" in told.fix


def test_misspelt_interface_is_no_machine_fault() -> None:
    for message in (
        "Unable to find interface for: [nope0]",
        "Bootstrap : no socket interface found",
    ):
        assert not failure_kinds.is_of_machine("communication", f"RuntimeError: {message}")
    assert failure_kinds.is_of_machine("communication", "RuntimeError: connection refused")


def test_hang_without_node_names_job() -> None:
    told = verdict_of([Failure(None, "", None, 0.0, "hang", "no progress for 8 s: all wait")], 0)
    assert "the cause: the job, " in verdict_to_lines(told)[0]
    assert verdict_to_lines(told)[0].endswith(": no progress for 8 s: all wait")


def test_kill_outranks_earlier_exception() -> None:
    """The error is of a child that the rank had forked, and lived through."""
    assert of_rank(0, "a", ended(-9, error("x")), 0.0).kind == "signal"
    assert of_rank(0, "a", {**ended(-9, error("x", pid=8)), "pid": 7}, 0.0).kind == "signal"


def test_exception_outranks_crash_during_exit() -> None:
    event = {**ended(-6, error("x", pid=7)), "pid": 7, "said": "terminate called"}
    assert of_rank(0, "a", event, 0.0).message == "ValueError: x"


# -- kinds ------------------------------------------------------------------------------------

DUMP = """\
terminate called after throwing an instance of '{}'
  what():  {}
Fatal Python error: Aborted

Current thread 0x00007f0 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 7 in linear
  File "/w/model.py", line 30 in forward
  File "/w/train.py", line 8 in <module>
  File "/home/u/.orchestrator/lib/1/orchestrator/node/job/ranks/rank.py", line 170 in run_python
"""


@pytest.mark.parametrize(
    ("event", "kind", "words", "where"),
    [
        ({"code": -9, "oom_kills": 1, "peak_kb": 3 << 20}, "out_of_memory", "peak was 3.0 GiB", ""),
        ({"code": -9, "oom_kills": 0}, "signal", "(SIGKILL)", ""),
        ({"code": -9, "oom_kills": 1, "memory": "it grew"}, "memory_floor", "it grew", ""),
        ({"code": -15, "oom_kills": 1}, "signal", "(SIGTERM)", ""),
        ({"code": -7, "shm_full": True}, "shared_memory", "/dev/shm is full", ""),
        ({"code": -7, "shm_full": False}, "signal", "(SIGBUS)", ""),
        (
            {"code": -6, "said": DUMP.format("std::bad_alloc", "std::bad_alloc")},
            "out_of_memory", ": std::bad_alloc", "/w/model.py:30 in forward",
        ),
        ({"code": -11, "said": DUMP}, "signal", "(SIGSEGV)", "/w/model.py:30 in forward"),
        ({"code": -6, "said": DUMP.format("std::system_error", "Resource temporarily unavailable")},
         "no_processes", ": Resource temporarily", "/w/model.py:30 in forward"),
        ({"code": 1, "said": "libgomp: Thread creation failed: Resource temporarily unavailable"},
         "no_processes", "1, after libgomp: Thread creation failed", ""),
        ({"code": 137}, "exit", "exit code 137, as after SIGKILL", ""),
        ({"code": 1, "words": "loss is nan\n  try a smaller lr"}, "exit", "loss is nan", ""),
        ({"code": 3, "words": "3"}, "exit", "ended with exit code 3", ""),
        (
            {"code": 1, "said": 'Traceback (most recent call last):\n  File "/w/a.py", line 3, in'
             ' f\n    g()\ntorch.OutOfMemoryError: CUDA out of memory. Tried\nbye\n'},
            "gpu_out_of_memory", "after torch.OutOfMemoryError", "/w/a.py:3 in f",
        ),
    ],
)  # fmt: skip
def test_of_rank_uses_facts_of_node(
    event: dict[str, Any], kind: str, words: str, where: str
) -> None:
    failure = of_rank(1, "b", {**ended(0), **event}, 0.0)
    assert (failure.kind, failure.where) == (kind, where)
    assert words in failure.message
    assert not failure.echo


def test_device_assert_names_failed_assertion() -> None:
    """As an H200 and torch 2.11 say it, late: the line that is named only waits for the result."""
    text = """CUDA error: device-side assert triggered
Search for `cudaErrorAssert' in https://docs.nvidia.com/cuda/cuda-runtime-api/ for more information.
CUDA kernel errors might be asynchronously reported at some other API call."""
    said = (
        "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1515: indexSelectSmallIndex:"
        " block: [0,0,0], thread: [3,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n"
    )
    failed = ended(1, {**error(text), "type": "AcceleratorError", "message": text})
    event = {**failed, "said": said}
    verdict = verdict_of([of_rank(0, "a", event, 5.0)], 1)
    assert verdict.kind == "gpu_error"
    words = "srcIndex < srcSelectDimSize is false in indexSelectSmallIndex"
    assert verdict.message == f"AcceleratorError: CUDA error: device-side assert triggered: {words}"
    assert "CUDA_LAUNCH_BLOCKING=1" in verdict.fix
    assert not failure_kinds.is_of_machine("gpu_error", verdict.message)
    illegal = "AcceleratorError: CUDA error: an illegal memory access was encountered"
    assert failure_kinds.kind_of_text(illegal) == "gpu_error"
    assert failure_kinds.is_of_machine("gpu_error", illegal)


GONE = (
    "4,1,5,-;NVRM: Xid (PCI:0000:4f:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off"
    " the bus"
)
FAULT = "4,11,344,-;NVRM: Xid (PCI:0000:4f:00): 31, MMU Fault: ENGINE GRAPHICS"


@pytest.mark.parametrize(
    ("said", "driver", "kind", "message"),
    [
        ("CUDA error: unspecified launch failure", [FAULT, GONE], "gpu_fault",
         "Xid 79 at 0000:4f:00: GPU has fallen off the bus; the rank says: ValueError: CUDA error:"
         " unspecified launch failure"),
        ("NCCL communicator was aborted on rank 3", [GONE], "gpu_fault",
         "Xid 79 at 0000:4f:00: GPU has fallen off the bus; the rank says: ValueError: NCCL"
         " communicator was aborted on rank 3"),
        ("CUDA error: an illegal memory access was encountered", [FAULT], "gpu_error",
         "ValueError: CUDA error: an illegal memory access was encountered; the driver says: Xid 31"
         " at 0000:4f:00: MMU Fault: ENGINE GRAPHICS"),
        ("the loss is NaN", [FAULT, GONE], "exception", "ValueError: the loss is NaN"),
    ],
    ids=["a GPU is gone", "no echo then", "a kernel is wrong", "something else"],
)  # fmt: skip
def test_driver_report_decides_gpu_fault(
    said: str, driver: list[str], kind: str, message: str
) -> None:
    failure = of_rank(1, "b", {**ended(1, error(said)), "driver": driver}, 5.0)
    verdict = verdict_of([failure], 1)
    assert (verdict.kind, verdict.message) == (kind, message)
    assert not failure.echo
    assert failure_kinds.is_of_machine(kind, message) == (kind != "exception")
    assert ("# before b in the node list" in verdict.fix) == (kind == "gpu_fault")


def test_invalid_device_ordinal_names_rank_count() -> None:
    text = "CUDA error: invalid device ordinal\nGPU device may be out of range"
    verdict = verdict_of([of_rank(0, "a", ended(1, error(text)), 5.0)], 1)
    assert verdict.kind == "environment"
    assert "no more ranks than GPUs" in verdict.fix


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("gpu_out_of_memory", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
        ("gpu_out_of_memory", "RuntimeError: CUDA error: out of memory"),
        ("gpu_out_of_memory", "OutOfMemoryError: HIP out of memory. Tried to allocate 1 GiB"),
        ("out_of_memory", "MemoryError"),
        ("out_of_memory", "OSError: [Errno 12] Cannot allocate memory"),
        ("out_of_memory", "_ArrayMemoryError: Unable to allocate 7 GiB for an array"),
        ("shared_memory", "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error."
         " It is possible that dataloader's workers are out of shared memory."),
        ("shared_memory", "RuntimeError: unable to allocate shared memory(shm) for file </torch_1>:"
         " No space left on device (28)"),
        ("shared_memory", "OSError: [Errno 28] No space left on device: '/dev/shm/rows'"),
        ("shared_memory", "RuntimeError: unable to write to file </torch_1>: No space left on"
         " device (28)"),
        ("shared_memory", "DistBackendError: NCCL error: Error while creating shared memory segment"
         " /dev/shm/nccl-QvzGjO (size 9637888)"),
        ("exception", "FileNotFoundError: [Errno 2] No such file or directory: '/dev/shm/a/7.pt'"),
        ("exception", "PermissionError: [Errno 13] Permission denied: '/dev/shm/rows'"),
        ("disk_full", "OSError: [Errno 122] Disk quota exceeded: '/home/u/x'"),
        ("disk_full", "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704"
         " vs 598"),
        ("no_processes", "RuntimeError: can't start new thread"),
        ("no_processes", "OSError: pthread_create failed: Resource temporarily unavailable"),
        ("exception", "BlockingIOError: [Errno 11] Resource temporarily unavailable"),
        ("environment", "ModuleNotFoundError: No module named 'apex'"),
        ("environment", "RuntimeError: The NVIDIA driver on your system is too old (found 11040)"),
        ("environment", "RuntimeError: CUDA error: no kernel image is available for execution"),
        ("environment", "AssertionError: Torch not compiled with CUDA enabled"),
        (
            "environment",
            "AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'",
        ),
        ("environment", "ImportError: libcudnn.so.9: cannot open shared object file: No such file"),
        ("communication", "RuntimeError: Gloo connectFullMesh failed with [..] Connection refused"),
        ("communication", "DistNetworkError: The server socket has failed to listen on any local"
         " network address. port: 29500, EADDRINUSE"),
        ("communication", "DistBackendError: NCCL error: Bootstrap : no socket interface found"),
        ("exception", "OSError: [Errno 98] Address already in use"),
        ("exception", "ConnectionError: HTTPSConnectionPool: Name or service not known"),
        ("exception", "KeyError: 'memory'"),
    ],
)  # fmt: skip
def test_kind_follows_from_message(kind: str, words: str) -> None:
    name, _, text = words.partition(": ")
    assert of_rank(0, "a", ended(1, error(text, type=name)), 0.0).kind == kind


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        (
            'subprocess.py", line 1901, in _execute_child\n    self.pid = _fork_exec(',
            "no_processes",
        ),
        ('popen_fork.py", line 66, in _launch\n    self.pid = os.fork()', "no_processes"),
        ('train.py", line 4, in <module>\n    fcntl.flock(file, LOCK_EX | LOCK_NB)', "exception"),
    ],
)
def test_held_lock_differs_from_lack_of_processes(frame: str, kind: str) -> None:
    """Both have the same words: where they come from tells them apart."""
    told = "BlockingIOError: [Errno 11] Resource temporarily unavailable"
    trace = f'Traceback (most recent call last):\n  File "/lib/{frame}\n{told}\n'
    name, _, text = told.partition(": ")
    raised = ended(1, error(text, type=name, traceback=trace))
    assert of_rank(0, "a", raised, 0.0).kind == kind
    printed = {**ended(1), "said": trace}
    assert of_rank(0, "a", printed, 0.0).kind == kind.replace("exception", "exit")


@pytest.mark.parametrize(
    ("words", "kind", "fix"),
    [
        ("No module named 'a.b'; 'a' is not a package", "exception", "a.py is imported"),
        ("cannot import name 'x' from 'a' (/p/a.py)", "exception", "/p/a.py has no x: "),
        ("cannot import name 'x' from 'a' (/v/site-packages/a.py)", "environment", "the others"),
    ],
)
def test_file_that_shadows_package_is_named(words: str, kind: str, fix: str) -> None:
    """Nothing has to be installed, on however many nodes it happens."""
    lacking = error(words, type="ImportError")
    told = verdict_of([of_rank(n, "a", ended(1, lacking, rank=n), 0.0) for n in (0, 1)], 2)
    assert (told.kind, fix in told.fix) == (kind, True)


def test_every_kind_has_fix() -> None:
    assert all(fix for name, (_, fix) in failure_kinds.KINDS.items() if name != "stopped")


def test_chained_exceptions_both_count() -> None:
    """A program that wraps what it catches; and one that only fails while it cleans up."""
    trace = (
        "Traceback (most recent call last):\n  File ...\nRuntimeError: [gloo/transport/tcp/pair.cc]"
        " Connection closed by peer\n\nThe above exception was the direct cause of the following"
        " exception:\n\nTraceback (most recent call last):\n  File ...\nStepFailed: step 7\n"
    )
    assert of_rank(0, "a", ended(1, error("step 7", type="StepFailed", traceback=trace)), 0.0).echo
    # Code that merely has the word in it says nothing.
    trace = "Traceback ...\n  File ...\n    store = TCPStore(host)\nKeyError: 'port'\n"
    own = of_rank(0, "a", ended(1, error("'port'", type="KeyError", traceback=trace)), 0.0)
    assert (own.kind, own.echo) == ("exception", False)


def test_dataloader_worker_killed_by_kernel_is_out_of_memory() -> None:
    words = "DataLoader worker (pid 71) is killed by signal: Killed. "
    event = {**ended(1, error(words, type="RuntimeError")), "oom_kills": 1}
    assert of_rank(0, "a", event, 0.0).kind == "out_of_memory"
    assert of_rank(0, "a", {**event, "oom_kills": 0}, 0.0).kind == "exception"


@pytest.mark.parametrize(
    "said",
    [
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)\n"
        + DUMP.format("c10d::DistBackendError", "[PG ID 0 Rank 0] NCCL watchdog thread terminated"),
        DUMP.format("gloo::IoException", "[pair.cc:553] Connection closed by peer [10.0.0.2]:41"),
    ],
)
def test_abort_after_lost_peer_is_echo(said: str) -> None:
    assert of_rank(0, "a", {**ended(-6), "said": said}, 0.0).echo


def test_of_torchrun_reads_last_line() -> None:
    said = "W0101 note\nTraceback (most recent call last):\n  File ...\nImportError: broken torch\n"
    failure = of_torchrun(1, "b", {"agent": 1, "said": said}, 5.0)
    assert (failure.kind, failure.rank) == ("environment", None)
    assert failure.message == "torchrun ended with exit code 1: ImportError: broken torch"
    lost = said.replace("ImportError: broken torch", "DistStoreError: TCPStore is gone")
    assert of_torchrun(1, "b", {"agent": 1, "said": lost}, 5.0).echo
    assert of_torchrun(1, "b", {"agent": 2}, 5.0).kind == "torchrun"
    noise = "[W1126 socket.cpp:207] [c10d] The client socket has failed to connect\n"
    by_limit = verdict_of([of_torchrun(1, "b", {"agent": -9, "said": noise}, 5.0)], 0)
    assert by_limit.message == "torchrun was killed by signal 9 (SIGKILL)"
    assert "`ulimit -t`" in by_limit.fix
    killed = of_torchrun(1, "b", {"agent": -9, "oom_kills": 1}, 5.0)
    assert killed.kind == "out_of_memory"


# -- echoes -----------------------------------------------------------------------------------

ECHOES = [
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:41",
    "[..pair.cc:553] Read error [10.0.0.2]:41: Connection reset by peer",
    "[..gloo/transport/tcp/pair.cc:339] writev [10.0.0.2]:42711: Connection timed out",
    "torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:2006, unhandled"
    " system error, NCCL version 2.21.5",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exited",
    "torch.distributed.DistNetworkError: The client socket has failed to connect to any network"
    " address of (10.0.0.1, 29500)",
    "torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients. 1/2 joined",
    "wait timeout after 600000ms, keys: /default_pg/0//cpu//0/1",
    "[Errno 32] Broken pipe",
    "[Errno 111] Connection refused",
    "failed to recv, got 0 bytes: recvBytes",
]


@pytest.mark.parametrize("words", ECHOES)
def test_message_about_lost_peer_is_echo(words: str) -> None:
    kind = words.split(":", maxsplit=1)[0].rpartition(".")[2] if ": " in words else "RuntimeError"
    echo = of_rank(0, "a", ended(1, error(words, type=kind)), 0.0)
    assert echo.echo


@pytest.mark.parametrize(
    "words",
    ["CUDA out of memory. Tried to allocate 2.00 GiB", "index 7 is out of bounds", "no such file",
     "CUDA error: device-side assert triggered", "loss is nan", "mat1 and mat2 shapes"],
)  # fmt: skip
def test_message_about_own_failure_is_no_echo(words: str) -> None:
    assert not of_rank(0, "a", ended(1, error(words)), 0.0).echo


# -- the cause --------------------------------------------------------------------------------


def failure(time: float, kind: str, message: str = "its own", rank: int | None = 0) -> Failure:
    return Failure(0, "a", rank, time, kind, message)


ECHO = ECHOES[0]
NEVER = "Gloo connectFullMesh failed with [...] Connection refused, remote=[127.0.0.1]:41"


@pytest.mark.parametrize(
    ("failures", "wanted"),
    [
        ([], None),
        ([failure(1, "exit")], 0),
        ([failure(2, "exit"), failure(1, "exception")], 1),
        # An echo may be reported first: what it echoes was slower to be noticed.
        ([failure(1, "exception", ECHO), failure(2, "exception")], 1),
        ([failure(1, "exception", ECHO), failure(2, "signal")], 1),
        ([failure(1, "exception", ECHO), failure(9, "lost", rank=None)], 1),
        ([failure(1, "exception", ECHO), failure(9, "supervisor", rank=None)], 1),
        # Echoes alone: the first of them.
        ([failure(2, "exception", ECHO), failure(1, "exception", ECHO)], 1),
        # Torchrun fails because a rank did; a supervisor is killed with all the rest.
        ([failure(1, "torchrun", rank=None), failure(2, "exception")], 1),
        ([failure(1, "supervisor", rank=None), failure(2, "exit")], 1),
        ([failure(1, "torchrun", rank=None), failure(2, "exception", ECHO)], 0),
        # A rank that ended well explains those who missed it, and nothing else.
        ([failure(1, "ended_early"), failure(2, "exception", ECHO)], 0),
        # Its end was seen later than others saw that its connections were closed.
        ([failure(3, "ended_early"), failure(2, "exception", ECHO)], 0),
        ([failure(1, "ended_early"), failure(2, "exception")], 1),
        ([failure(1, "ended_early")], None),
        # Who never reached another is nearer to the cause than who was left by one.
        ([failure(1, "exception", ECHO), failure(2, "exception", NEVER)], 1),
        ([failure(1, "exception", NEVER), failure(2, "exception")], 1),
        ([failure(1, "communication", NEVER), failure(2, "torchrun", rank=None)], 1),
        # A lost node is a cause like any other.
        ([failure(1, "lost", rank=None), failure(2, "exit")], 0),
    ],
)
def test_cause_is_independent_of_arrival_order(failures: list[Failure], wanted: int | None) -> None:
    expected = None if wanted is None else failures[wanted]
    assert find_cause(failures) is expected
    # The order of their arrival does not count.
    for _ in range(5):
        shuffled = random.sample(failures, len(failures))
        assert find_cause(shuffled) == expected


def test_who_names_node_without_rank() -> None:
    assert failure(0, "lost", rank=None).who == "node 0 (a)"


def test_broken_link_without_failed_rank_is_link_fault() -> None:
    told = verdict_of([failure(1, "exception", ECHO), failure(2, "exception", ECHO, rank=1)], 4)
    assert (told.kind, told.time, told.others, told.same) == ("link", 1, 3, ())
    lossy = (
        "RuntimeError: [gloo/transport/tcp/pair.cc:339] writev [10.0.0.2]:4: Connection timed out"
    )
    told = verdict_of([failure(1, "communication", lossy)], 1)
    assert (told.kind, "large packets" in told.fix) == ("link", True)


def test_broken_connection_of_program_is_exception() -> None:
    """A download that broke off is no fault of the network between the nodes."""
    words = "[Errno 104] Connection reset by peer"
    own = of_rank(0, "a", ended(1, error(words, type="ConnectionResetError")), 0.0)
    told = verdict_of([own], 1)
    assert told.kind == "exception"


def test_verdict_counts_same_and_caused_failures() -> None:
    failures = [
        failure(1, "exception", rank=0),
        failure(2, "exception", rank=2),
        failure(3, "exception", "another\nof two lines", rank=3),
        failure(4, "exception", ECHO, rank=4),
    ]
    told = verdict_of(failures, 10)
    assert (told.rank, told.same, told.others) == (0, (2,), 7)
    assert told.also == (Cause(rank=3, node=0, message="another"),)
    assert verdict_to_lines(told)[1:] == [
        "  the same on rank 2",
        "  rank 3 on node 0 failed by itself too: another",
        "  7 other ranks failed as a consequence",
        "what to do: fix the line that is named",
    ]
    assert conclude_verdict([], 0) is None


def test_excerpt_keeps_end_and_message_of_traceback() -> None:
    frames = [f'  File "/w/{n}.py", line {n}, in f\n    g({n})\n    ~^^^' for n in range(40)]
    trace = "\n".join([verdict.TRACEBACK, *frames, "RuntimeError: missing", *["  key"] * 900])
    shown = verdict.excerpt_of(trace.splitlines(), 10)
    assert len(shown) == 10
    assert shown[:2] == [verdict.TRACEBACK, "... (75 lines left out)"]
    assert shown[-4:] == [
        "    g(39)",
        "RuntimeError: missing",
        "  key",
        "... (899 lines left out)",
    ]
    assert verdict.excerpt_of(["a", "b", "c"], 2) == ["... (2 lines left out)", "c"]
    dump = ["Fatal Python error: Segmentation fault", *frames[0].splitlines()[:1] * 9]
    assert verdict.excerpt_of(dump, 3) == [*dump[:2], "... (8 lines left out)"]


def test_not_started_and_stopped_name_no_node() -> None:
    told = unstarted_verdict("b: No space left on device", 1.0)
    assert (told.kind, told.node, told.rank) == ("disk_full", None, None)
    assert verdict_to_lines(told)[-1].startswith("what to do: free some space")
    assert unstarted_verdict("b: what?", 1.0).kind == "start"
    assert (stopped_verdict("Ctrl-C", 1.0).kind, stopped_verdict("Ctrl-C", 1.0).fix) == (
        "stopped",
        "",
    )


def test_of_silent_blames_silent_node() -> None:
    told = Failure(1, "b", None, 10.0, "lost", "no word between node 1 and node 0 for 6 s")
    other = Failure(2, "c", 2, 11.0, "signal", "killed by signal 9 (SIGKILL)")
    named = verdict.blame_silent_node([told, other], [(0, "a")])
    assert [(one.node, one.node_name) for one in named] == [(0, "a"), (2, "c")]
    assert verdict.blame_silent_node([told, other], []) == [told, other]
    assert verdict.blame_silent_node([told], [(1, "b"), (0, "a")]) == [told]


def test_cause_of_equal_failures_is_earliest() -> None:
    said = Failure(0, "a", 1, 12.0, "exception", "ValueError: x")
    earlier = Failure(1, "b", 3, 11.0, "exception", "ValueError: x")
    other = Failure(1, "b", 2, 11.5, "exception", "KeyError: 1")
    assert verdict.find_cause([said, earlier, other]) == said
    assert verdict.find_cause([other, said, earlier]) == earlier
