"""The kinds of failures: the patterns that identify each, and a fix for the user. Pure functions.

The patterns are not compiled at import: most jobs never fail, and compiling all takes 7 ms.
"""

from __future__ import annotations

import re

FIX_IT = "fix the line that is named"
# Each kind, as in job.json, with its title on the screen and its fix.
KINDS = {
    "exception": ("an exception", FIX_IT),
    "exit": (
        "it ended itself",
        "the last lines of its log say why; the exit code is the program's own",
    ),
    "signal": ("a signal", "look at the last lines of its log, and at `dmesg` on that node"),
    "out_of_memory": (
        "out of memory on the host",
        "use smaller batches, fewer DataLoader workers or fewer ranks on that node; `free -g` and"
        " the limits of its container or `ulimit -v` show what there is",
    ),
    "memory_floor": (
        "the node was running out of memory",
        "use smaller batches, fewer DataLoader workers or fewer ranks on that node; `orchestrator"
        " report` shows its memory over time; --set launch.memory_floor=GB changes the limit",
    ),
    "gpu_out_of_memory": (
        "out of memory on the GPU",
        "use smaller batches with more gradient accumulation, activation checkpointing or more"
        " sharding; `nvidia-smi` there shows whether another process holds memory",
    ),
    "gpu_error": (
        "an error in a kernel on the GPU",
        "the GPU reports it late, so the line may be another: --env CUDA_LAUNCH_BLOCKING=1 names"
        " the right one; the usual cause is an index or a label that is out of range",
    ),
    "gpu_fault": (
        "a GPU failed",
        "reset the GPU, or start the machine again; https://docs.nvidia.com/deploy/xid-errors/ says"
        " what each Xid means",
    ),
    "shared_memory": (
        "/dev/shm is full",
        "see `df -h /dev/shm` on that node: remove old files, use fewer DataLoader workers, or"
        " give the container more (docker --shm-size, an emptyDir in Kubernetes)",
    ),
    "disk_full": (
        "no space left on a disk",
        "free some space on that node (`df -h`, `df -i`, `quota`), or write elsewhere",
    ),
    "no_processes": (
        "no further process or thread could be started",
        "that node allows this login or container no more of them: `ulimit -u`, `cat"
        " /sys/fs/cgroup/pids.max`; `ps -u $USER -L | wc -l` counts them; or fewer DataLoader"
        " workers and threads (OMP_NUM_THREADS)",
    ),
    "environment": (
        "the node's environment",
        "make that node like the others: the same packages, driver and CUDA; `--python` or"
        " python= in the list chooses which Python runs",
    ),
    "communication": (
        "the ranks could not connect to each other",
        "see `master_launch --dry-run` for the interface and address of every node, set ifname= in"
        " the list if one is wrong, and let firewalls pass everything between the nodes",
    ),
    "link": (
        "a connection between ranks broke although no rank had failed",
        "look at the network between the nodes (`ip -s link`, `dmesg`, the switch; `orchestrator"
        " doctor` finds one that loses large packets); start again from the last checkpoint",
    ),
    "ended_early": (
        "a rank had ended while others waited for it",
        "let all ranks run the same number of steps and collectives, and end together",
    ),
    "lost": (
        "the node is lost",
        "check whether it runs (`ssh`, its console): it or the network to it went down; when it"
        " answers again, `orchestrator emergency-stop` ends what still runs there",
    ),
    "hang": (
        "no progress",
        "see where each rank is: the one that is somewhere else than the rest is the cause",
    ),
    "elsewhere": (
        "it was ended on another node",
        "the terminal of `orchestrator run-node` there, and its experiment, have the cause",
    ),
    "torchrun": ("torchrun failed", "its own message is at the end of that node's log"),
    "supervisor": (
        "the job's supervisor was killed",
        "a user or the out-of-memory killer ended our process on that node, or it was started"
        " again: see `dmesg` and `uptime` there",
    ),
    "start": ("it could not be started", "fix what the message says and launch again"),
    "stopped": ("it was stopped", ""),
}

# A machine can cause these kinds. All others are caused by the program, on any rank.
OF_MACHINES = (
    *("lost", "signal", "out_of_memory", "shared_memory", "disk_full", "no_processes"),
    *("environment", "communication", "link", "torchrun", "supervisor", "hang"),
    "gpu_fault",
)
OF_DEVICES = (
    r"(CUDA|HIP) error(?!: device-side assert)|NCCL error|\bNVML|\bECC\b|Input/output error"
)

HELPER_FIX = (
    "something killed a process that the rank had started, usually the kernel for lack of memory:"
    " fewer DataLoader workers or smaller batches; see `dmesg` and `free -g` on that node"
)
LATE_FIX = (
    "see what that line does while the others wait: let all ranks take about as long, or give the"
    " others more time, as in init_process_group(timeout=...)"
)
# The program has a file with the name of a package, which lacks a name that is imported.
HIDES = r"; '(\w+)' is not a package"
OWN_FILE = r"cannot import name '(\w+)' from '([\w.]+)' \(((?!.*(site|dist)-packages/).+)\)"

ENDED = ("signal", "torchrun")
RAN = ("exception", "exit", "torchrun")
# The kinds (none: all of them), a text in the message, and what to do; the first match counts.
FIXES: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ENDED,
        r"\(SIGKILL\)",
        "something killed it: a person, a scheduler's limit, `ulimit -t`, or the kernel for"
        " lack of memory (see `dmesg` on that node)",
    ),
    (
        ENDED,
        r"\(SIGSEGV\)",
        "native code crashed, at the frames in the rank's log; usually an extension built"
        " for another version of torch, CUDA or libc",
    ),
    (
        ENDED,
        r"\(SIGBUS\)",
        "file-backed memory is missing: usually /dev/shm is full (`df -h"
        " /dev/shm`; fewer DataLoader workers, docker --shm-size), or a mapped file was truncated",
    ),
    (
        ENDED,
        r"\(SIGABRT\)",
        "a native library gave up: the rank's log has its message, above the stacks",
    ),
    (
        ENDED,
        r"\(SIGFPE\)",
        "native code divided by zero, at the frames in the rank's log",
    ),
    (
        ENDED,
        r"\(SIGILL\)",
        "this CPU lacks an instruction: the binary was built for another one",
    ),
    (
        ENDED,
        r"\(SIGTERM\)",
        "another process asked it to end: a scheduler, an admin, a shutdown of that node",
    ),
    (
        ENDED,
        r"\(SIGXCPU\)",
        "it used up the processor time that `ulimit -t` on that node allows",
    ),
    (
        ("communication",),
        r"(?i)address already in use|EADDRINUSE",
        "another process there holds the port: `ss -ltnp` names it; `orchestrator"
        " emergency-stop` ends your jobs, --master-port chooses another port",
    ),
    (
        (),
        r"^(EOFError: EOF when reading a line|BdbQuit|bdb\.BdbQuit)",
        "ranks have no standard input, as under torchrun with a scheduler: take the value from an"
        " argument or a file, and leave out breakpoint()",
    ),
    ((), HIDES, r"a file \1.py is imported in place of the package \1: rename it"),
    (
        (),
        OWN_FILE,
        r"\3 has no \1: correct the import, or rename that file where an installed package \2 is"
        r" meant",
    ),
    (
        (),
        r"attempted relative import",
        "the file is part of a package: launch it as a module, `-m package.module`",
    ),
    (
        (),
        r"not compiled with CUDA|has no attribute '_cuda_",
        "the torch of that Python is built without CUDA: install one that fits the driver"
        " (`nvidia-smi` names it), or let the program compute on the processor",
    ),
    (
        (),
        r"failed to map segment from shared object",
        "the disk of that library may be mounted noexec there (`findmnt -T FILE` says so): install"
        " the environment on another; or the login may have too little memory (`ulimit -v`)",
    ),
    (
        (),
        r"invalid device ordinal",
        "the program takes a GPU that this rank does not see: `--nproc N` or slots= for no more"
        " ranks than GPUs, or CUDA_VISIBLE_DEVICES hides some; a rank's own is cuda:LOCAL_RANK",
    ),
    # Limits of a login or a container, which a program can exceed on any line.
    (
        RAN,
        r"Errno 24\b|Too many open files",
        "the login's limit of open files is low there (`ulimit -n`): as root, '* - nofile 65536' in"
        " /etc/security/limits.conf; or fewer DataLoader workers, or"
        " torch.multiprocessing.set_sharing_strategy('file_system')",
    ),
    # Errors of packages that are installed or called in a wrong way.
    (
        RAN,
        r"Default process group has not been initialized",
        "the program has not called init_process_group before that line, in every rank;"
        " ultralytics calls it only for device=0,1,... with all ranks on one machine (--nnodes 1)",
    ),
    (
        RAN,
        r"Weights only load failed",
        "torch.load reads nothing but tensors unless told otherwise: weights_only=False in the"
        " program, or --env TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1, for files that you trust",
    ),
    (
        ("environment",),
        r"^ImportError: .*\b(requires|needs|incompatible|minimum|at least)\b",
        "nothing is missing: two packages there do not fit together; install the version that the"
        " message asks for, for the Python that the job runs",
    ),
    (
        RAN,
        r"operator torchvision::\w+ does not exist",
        "torchvision there is built for another torch: install the pair that belongs together, from"
        " one index",
    ),
    (
        ("exception",),
        r"^KeyError: '(SLURM|SLURMD)_",
        "the program reads what srun sets: --set launch.rank_env=slurm sets it for each rank here",
    ),
    (
        ("exception",),
        r"Error: .*\bscontrol\b",
        "scontrol needs a Slurm there: SLURM_JOB_NODELIST is the addresses with commas between"
        " them, and MASTER_ADDR the first",
    ),
    (
        ("exception",),
        r"^KeyError: '(OMPI_|PMI_|MPI_)",
        "the program reads what mpirun sets: read RANK, WORLD_SIZE and LOCAL_RANK in its place",
    ),
    (
        ("exception",),
        r"^KeyError: '(LOCAL_RANK|LOCAL_WORLD_SIZE|TORCHELASTIC_\w+)'",
        "torchrun sets it: leave --no-torchrun out",
    ),
    # Errors of torch if a program handles a sharded model like a complete one.
    (
        ("exception",),
        r"got mixed torch\.Tensor and DTensor|FSDP does not support deepcopy"
        r"|data pointer on an invalid python storage",
        "the weights are in shards there: trainer.save(PATH) writes whole ones and"
        " trainer.state_dict() returns them; docs/trainer.md#hooks shows how to keep an average of"
        " them",
    ),
    # Errors of torch.distributed.checkpoint if a rank cannot read files of other ranks.
    (
        ("exception",),
        r"^CheckpointException: .*No such file or directory",
        "torch.distributed.checkpoint wants one directory on a disk that all nodes share: write to"
        " one; without one, the Trainer keeps what a restart needs",
    ),
    (
        ("exception",),
        r"^FileNotFoundError|^ValueError: Can't find a valid checkpoint at",
        "the file has to be on that node too: share or copy it, or set workdir=; orchestrator"
        " push brings it to all nodes",
    ),
)

FULL = r"(No space left on device|Disk quota exceeded|Cannot allocate memory|Errno (12|28|122)\b)"

# The text of an exception, a dump or torchrun that identifies a kind; the first match counts.
TEXTS = (
    (
        "gpu_out_of_memory",
        r"(CUDA|HIP|XPU|GPU) out of memory|CUDA error: out of memory|^(torch\.)?(cuda\.)?"
        r"OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|Cuda failure (2 )?'out of memory'",
    ),
    (
        "gpu_error",
        r"(CUDA|HIP) error: (device-side assert triggered|an illegal|unspecified launch failure"
        r"|misaligned address|operation not supported on global)",
    ),
    (
        "shared_memory",
        r"out of shared memory|shared memory\s?\(shm\)|unable to (mmap|resize) .*shared"
        r"|killed by signal: Bus error|unable to write to file </torch_"
        rf"|{FULL}.*/dev/shm/|/dev/shm/.*{FULL}"
        r"|(creat|extend|allocat)\w* .*/dev/shm/(?!.*(Permission|No such file))",
    ),
    (
        "disk_full",
        r"No space left on device|Disk quota exceeded|Errno (28|122)\b"
        r"|PytorchStreamWriter failed writing|inline_container.*unexpected pos"
        r"|database or disk is full",
    ),
    (
        "out_of_memory",
        r"^(numpy\..*)?_?(Array)?MemoryError|Cannot allocate memory|Errno 12\b|std::bad_alloc"
        r"|DefaultCPUAllocator: (can't|not enough)",
    ),
    (
        "no_processes",
        r"can't start new thread|no further process or thread can be started"
        r"|(fork|pthread_create|thread creation|spawn).*Resource temporarily unavailable"
        r"|OMP: System error #11\b|^(std::system_error: )?Resource temporarily unavailable$",
    ),
    (
        "environment",
        r"^(ImportError|ModuleNotFoundError)|No module named|cannot open shared object file"
        r"|NVIDIA driver|CUDA driver version|no kernel image is available"
        r"|not compiled with (CUDA|NCCL)|has no attribute '_cuda_|no CUDA GPUs are available"
        r"|invalid device ordinal|no CUDA-capable device|undefined symbol"
        r"|GLIBC(XX)?_[\d.]+. not found",
    ),
)
# Errors of torch.distributed or its transports, not of a program's own downloads and servers.
DISTRIBUTED = (
    r"(?i)gloo|nccl|Dist\w*Error|TCPStore|c10d|rendezvous|socket\.cpp|ProcessGroup|transport/"
    r"|client socket|server socket"
)
# A program's message matches this if its GPU is broken, but also for other reasons.
OF_GPUS = r"(?i)CUDA|NCCL|cuDNN|cuBLAS|\bGPU\b"
# A rank cannot open connections for a reason on its own node.
OWN_NETWORK = (
    r"(?i)Unable to find (address|interface)|no socket interface found|ifa != nullptr"
    r"|address already in use|EADDRINUSE|name or service not known|name resolution"
    r"|gai error|Duplicate GPU|invalid usage|No IB device|Cannot assign requested address"
)
NO_SUCH_INTERFACE = (
    r"(?i)Unable to find (address|interface)|no socket interface found|ifa != nullptr|No IB device"
)
# A rank never reached another one. This is closer to the cause than a lost connection.
NEVER_MET = (
    r"(?i)connectFullMesh|no route to host|network is unreachable|connection refused"
    r"|failed to connect|clients joined|waiting for clients"
)
# A rank lost its peer: it failed because of that one, not by itself.
ECHO = (
    r"(?i)connection (was )?(closed|reset|refused)|connection timed out|broken pipe"
    r"|remote process exited|DistBackendError|DistNetworkError|DistStoreError|socket timeout"
    r"|timed out (waiting|after)|wait timeout|unhandled (system|cuda) error, NCCL"
    r"|Rendezvous\w*Error|SignalException|failed to connect|recvBytes|TCPStore"
    r"|connectFullMesh|no route to host|network is unreachable|watchdog"
    r"|communicator was aborted|ncclCommAbort|ChildFailedError|ended because of another rank"
)
BROKEN = (
    r"connection (was )?(closed|reset)|connection timed out|broken pipe|recvBytes|remote process"
)
# The out-of-memory killer may kill a helper process instead of the rank.
HELPER_DIED = (
    r"killed by signal: Killed|exited unexpectedly|terminated abruptly|died with <Signals.SIGKILL"
)

# The innermost frame creates a process. Without it EAGAIN may be about a locked file.
MAKES_A_PROCESS = r"(?m), in (_execute_child|_launch|fork\w*)$|\bos\.fork"
NO_PROCESS = r"(?m)^BlockingIOError: \[Errno 11\]"


def kind_of_trace(trace: str) -> str:
    """Return the kind that the innermost frame of a traceback identifies, else ""."""
    frame = trace.rpartition('\n  File "')[2]
    makes = re.search(MAKES_A_PROCESS, frame) and re.search(NO_PROCESS, frame)
    return "no_processes" if makes else ""


def kind_of_text(text: str) -> str:
    """Return the kind that the text of a failure identifies, else ""."""
    for kind, pattern in TEXTS:
        if re.search(pattern, text, re.IGNORECASE | re.MULTILINE):
            return kind
    if re.search(DISTRIBUTED, text) and (re.search(OWN_NETWORK, text) or re.search(ECHO, text)):
        return "communication"
    return ""


def fix_of(kind: str, message: str = "") -> str:
    """Return the sentence on how to fix a failure of this kind."""
    for kinds, pattern, fix in FIXES:
        if (not kinds or kind in kinds) and (found := re.search(pattern, message)):
            return found.expand(fix)
    return KINDS.get(kind, KINDS["exception"])[1]


def title_of(kind: str) -> str:
    return KINDS.get(kind, (kind, ""))[0]


def is_of_machine(kind: str, message: str) -> bool:
    """Return True if the machine can be the cause of such a failure.

    An interface that a variable names and no machine has is the user's mistake.
    """
    if re.search(NO_SUCH_INTERFACE, message):
        return False
    return kind in OF_MACHINES or bool(re.search(OF_DEVICES, message))
