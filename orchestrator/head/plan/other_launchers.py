"""Reject what each rank would fail at: a launcher of ranks, and a script with a syntax error.

Options of other launchers are not translated: docs/coming-from has our names for them.
"""

from __future__ import annotations

import contextlib
import platform
import re
import shlex
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from orchestrator.common.errors import UsageError
from orchestrator.protocol.spec import Target

LAUNCHERS = (
    r"(torchrunx?|deepspeed|composer|mpirun|mpiexec|horovodrun|colossalai run|accelerate launch"
    r"|fabric run|tune run(?= -)|trl (?:sft|dpo|grpo|kto|reward|rloo)"
    r"|python[\d.]* (?:-u )?-m (?:torch\.distributed\.(?:run|launch)|accelerate\.commands\.launch"
    r"|deepspeed\.launcher\.runner|composer\.cli\.launcher))(?:\s(.*)|$)"
)
TYPED = re.compile(LAUNCHERS, re.DOTALL)
IN_A_SCRIPT = re.compile(rf"(?:(?:exec|nohup|time|env|\w+=\S*)\s+)*{LAUNCHERS}")
INSTEAD = {
    "srun": "type the program behind it: master_launch PROGRAM; in an allocation of Slurm its"
    " nodes are used, and --set launch.rank_env=slurm sets SLURM_PROCID",
    "sbatch": "orchestrator submit slurm --nnodes N PROGRAM writes the batch file and submits it",
    "lightning run": "type: master_launch SCRIPT; Lightning finds torchrun's variables",
    "ray start": "Ray starts its own processes, and its head is one node alone: orchestrator exec"
    " -- ray start ...",
}
SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
MOST_READ_BYTES = 1 << 20


def refuse_launchers(program: Sequence[str]) -> None:
    """Raise UsageError if the program starts ranks by itself, with the command to type instead."""
    if not program:
        return
    file = Path(program[0])
    if file.suffix == ".ipynb":
        raise UsageError(
            f"{file} is a notebook, not a program",
            f"jupyter nbconvert --to script {shlex.quote(str(file))}   makes one of it; or use the"
            " nodes from the notebook: from orchestrator import Cluster",
        )
    if file.exists() and file.parent.name != "bin":
        # This is the user's own program with the name of a launcher.
        return
    if len(program) == 1 and re.match(r"(python[\d.]*|\S+\.py)\s", program[0]):
        raise UsageError(
            f"there is no program {program[0]!r}: the quotes make one word of it",
            f"type: master_launch {program[0]}",
        )
    typed = " ".join([file.name, *program[1:]])
    for words, instead in INSTEAD.items():
        if f"{typed} ".startswith(f"{words} "):
            raise UsageError(f"{words} cannot be launched on the nodes", instead)
    if match := TYPED.match(typed):
        raise UsageError(
            f"{match[1].strip()} starts ranks by itself, and each rank of this job would do so",
            f"type: {without_launcher(match)}; its options: docs/coming-from",
        )


def refuse_script(program: Sequence[str]) -> None:
    """Raise UsageError if a shell script starts ranks by itself, with the command to type."""
    named = program[1:2] if program[0] in SHELLS else program[:1]
    for line in lines_of(Path(named[0])) if named else ():
        if match := IN_A_SCRIPT.match(line):
            by_itself = shlex.join(["master_launch", "--no-torchrun", *program])
            raise UsageError(
                f"{named[0]} calls {match[1].strip()}, which starts ranks by itself, and each rank"
                " of this job would do so",
                f"type: {without_launcher(match)}   (with --env NAME=VALUE for what the script"
                " sets); or, where the script itself reads MASTER_ADDR, NNODES and NODE_RANK:"
                f" {by_itself}",
            )


def refuse_syntax_error(target: Target) -> None:
    """Raise UsageError if this Python cannot compile a script, with the place of the error.

    No node is asked: its Python may be newer than this one, and then the user decides.
    """
    file = Path(target.name)
    if target.kind != "auto" or file.suffix != ".py" or not file.is_file():
        return
    try:
        with warnings.catch_warnings(), contextlib.suppress(OSError, ValueError, RecursionError):
            warnings.simplefilter("ignore")
            compile(file.read_bytes(), target.name, "exec", dont_inherit=True)
    except SyntaxError as error:
        frame = "".join(traceback.format_exception_only(error)).rstrip().splitlines()[1:-1]
        raise UsageError(
            "\n".join([f"{target.name}:{error.lineno or 1}: {error.msg}", *frame]),
            f"Python {platform.python_version()} of this machine cannot read it; if the nodes'"
            " Python is newer and can, --check none leaves it to them",
        ) from None


def without_launcher(match: re.Match[str]) -> str:
    """Return the command to type instead of a launcher's, with its program if that is found."""
    program = re.search(r"(?:-m|--module)\s+\S+|\S+\.py\b", match[2] or "")
    return f"master_launch {program[0] if program else 'PROGRAM'} ..."


def lines_of(file: Path) -> list[str]:
    """Return the lines of a shell script, [] for any other file and for a missing one."""
    try:
        with file.open("rb") as script:
            text = script.read(MOST_READ_BYTES).decode(errors="replace")
    except OSError:
        return []
    first = text.partition("\n")[0]
    shell = first.startswith("#!") and Path((first.split() or [""])[-1]).name in SHELLS
    if not shell and file.suffix not in (".sh", ".bash"):
        return []
    return re.sub(r"\\\n\s*", " ", text).splitlines()
