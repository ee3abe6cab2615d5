"""Refuse a command or a shell script that starts ranks by itself, as each rank of the job would.

Pure but for the script that is read; each error says what to type here.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from orchestrator.common.errors import UsageError

# What is typed -> the words before the program that it would start, kept here.
LAUNCHERS: dict[tuple[str, ...], tuple[str, ...]] = {
    **dict.fromkeys((("torchrun",), ("torchrunx",), ("deepspeed",), ("composer",)), ()),
    **dict.fromkeys((("mpirun",), ("mpiexec",), ("horovodrun",), ("colossalai", "run")), ()),
    **dict.fromkeys((("accelerate", "launch"), ("fabric", "run")), ()),
    ("tune", "run"): ("tune", "run"),  # torchtune's; without torchrun's options it starts none
}
MODULES = (
    *("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"),
    *("deepspeed.launcher.runner", "composer.cli.launcher"),
)
OF_TRL = ("sft", "dpo", "grpo", "kto", "reward", "rloo")  # `trl` is accelerate around its scripts
KEPT = {  # their options -> ours
    **dict.fromkeys(("--nproc-per-node", "--num-gpus", "--nproc"), "--nproc"),
    **{"--max-restarts": "--max-restarts", "--config-file": "--accelerate-config", "-x": "--env"},
}
ALONE = (  # options without a value
    *("--standalone", "--no-python", "--run-path", "--use-env", "--virtual-local-rank"),
    *("--multi-gpu", "--cpu", "--use-deepspeed", "--use-fsdp", "--no-local-rank", "--force-multi"),
    *("-v", "--verbose", "-q", "--quiet", "--allow-run-as-root", "--oversubscribe"),
)
MODULE = ("-m", "--module", "--module-mode")

# Programs of another launcher that have their own way to be typed here, or none.
OTHERS: dict[tuple[str, ...], str] = {
    ("srun",): "type the program behind it: master_launch PROGRAM; in an allocation of Slurm its"
    " nodes are used, and --rank-env slurm sets SLURM_PROCID",
    ("sbatch",): "orchestrator submit slurm --nnodes N PROGRAM writes the batch file and submits"
    " it",
    ("lightning", "run"): "type: master_launch SCRIPT; Lightning finds torchrun's variables",
    ("ray", "start"): "Ray starts its own processes, and its head is one node alone: orchestrator"
    " exec -- ray start ...",
    **dict.fromkeys(
        tuple((name, "run") for name in ("uv", "poetry", "pdm", "hatch", "pipenv", "rye", "pixi")),
        "name the environment, then the program: master_launch --activate venv:DIR SCRIPT",
    ),
    **dict.fromkeys(
        tuple((name, "run") for name in ("conda", "mamba", "micromamba")),
        "name the environment, then the program: master_launch --activate conda:NAME SCRIPT",
    ),
}
MAKEFILES = ("GNUmakefile", "makefile", "Makefile")
RULE = re.compile(r"([^\s#:=][^#:=]{0,999}):(?!=)")
SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
MOST_READ_BYTES = 1 << 20
STARTS_RANKS = re.compile(
    r"(?:(?:exec|nohup|time|env|\w+=\S*)\s+)*((?:python[\d.]*\s+(?:-u\s+)?-m\s+torch\.distributed\."
    r"(?:run|launch)|torchrun|accelerate\s+launch|deepspeed|mpirun|mpiexec|srun)\s.*)"
)
ENDS_A_COMMAND = re.compile(r"[|&;<>]|\d>.*")


def refuse_script(program: Sequence[str]) -> None:
    """Refuse a shell script or a Makefile that starts ranks by itself, and say what to type."""
    named = [*program[1:2]] if program[0] in SHELLS else [*program[:1]]
    call = launcher_in(Path(named[0])) if named else []
    arguments = program[2:] if program[0] in SHELLS else program[1:]
    if program[0] == "make":
        named, arguments = [shlex.join(program)], ()
        call = launcher_of_make(program[1:])
    if not call:
        return
    size = call.index("-m") + 2 if is_python(call[0]) else 1 + (call[0] == "accelerate")
    words = [w for word in call[size:] for w in (arguments if word in ("$@", "$*") else [word])]
    ours, theirs = without_options(words, call[0])
    raise UsageError(
        f"{named[0]} calls {' '.join(call[:size])}, which starts ranks by itself, and each rank of"
        " this job would do so",
        f"type: {shlex.join(['master_launch', *ours, *theirs])}   (with --env NAME=VALUE for what"
        " the script sets); or, where the script itself reads MASTER_ADDR, NNODES and NODE_RANK:"
        f" {shlex.join(['master_launch', '--no-torchrun', *program])}",
    )


def launcher_in(file: Path) -> list[str]:
    """Return the words with which a shell script starts ranks; not where it does so at times."""
    try:
        with file.open("rb") as script:
            text = script.read(MOST_READ_BYTES).decode(errors="replace")
    except OSError:  # it is on the nodes alone
        return []
    first = text.partition("\n")[0]
    shell = first.startswith("#!") and Path((first.split() or [""])[-1]).name in SHELLS
    if not shell and file.suffix not in (".sh", ".bash"):
        return []
    return launcher_among(text.replace("\\\n", " ").splitlines())


def launcher_of_make(words: Sequence[str]) -> list[str]:
    """Return the words with which the targets of a `make` start ranks, where its file is here."""
    file = next((f for f in map(Path, MAKEFILES) if f.is_file()), None)
    if file is None or any(word.startswith("-") for word in words):
        return []
    try:
        text = file.read_bytes()[:MOST_READ_BYTES].decode(errors="replace")
    except OSError:
        return []
    recipes: dict[str, list[str]] = {}
    of: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("\t"):
            for name in of:
                recipes[name].append(line.strip().lstrip("@-+ "))
        elif rule := RULE.match(line):
            of = rule[1].split()
            recipes.update((name, []) for name in of)
    first = next((name for name in recipes if not name.startswith(".")), "")
    targets = [word for word in words if "=" not in word] or [first]
    return launcher_among([line for name in targets for line in recipes.get(name, [])])


def launcher_among(lines: Sequence[str]) -> list[str]:
    """Return the words of the first line that starts ranks, as far as its command goes."""
    for line in lines:
        if match := STARTS_RANKS.match(line):
            try:
                words = shlex.split(match[1], comments=True)
            except ValueError:
                words = match[1].split()
            return list(itertools.takewhile(lambda w: not ENDS_A_COMMAND.match(w), words))
    return []


def refuse(program: Sequence[str]) -> None:
    """Refuse such a command, and say what to type here."""
    file = Path(program[0]) if program else Path()
    notebook = file.suffix == ".ipynb"
    if file.exists() and file.parent.name != "bin" and not notebook:
        return  # the user's own, with such a name
    typed = program[0].split() if len(program) == 1 else []
    if len(typed) > 1 and (is_python(typed[0]) or typed[0].endswith(".py")) and not file.exists():
        raise UsageError(
            f"there is no program {program[0]!r}: the quotes make one word of it",
            f"type: {shlex.join(['master_launch', *typed])}",
        )
    if notebook:
        raise UsageError(
            f"{file} is a notebook, not a program",
            f"jupyter nbconvert --to script {shlex.quote(str(file))}   makes one of it; or use the"
            " nodes from the notebook: from orchestrator import Cluster",
        )
    words = [Path(program[0]).name, *program[1:]]
    for typed_words, instead in OTHERS.items():
        if tuple(words[: len(typed_words)]) == typed_words:
            raise UsageError(f"{' '.join(typed_words)} cannot be launched on the nodes", instead)
    size = next((len(typed) for typed in LAUNCHERS if tuple(words[: len(typed)]) == typed), 0)
    kept = LAUNCHERS.get(tuple(words[:size]), ())
    if words[0] == "trl" and words[1:2] and words[1] in OF_TRL:
        size, kept = 2, ("-m", f"trl.scripts.{words[1]}")
    if is_python(words[0]) and words[1:2] == ["-m"] and words[2:3] and words[2] in MODULES:
        size = 3
    after = words[size:]
    if not size or (kept[:1] == ("tune",) and after[:1] and not after[0].startswith("-")):
        return
    ours, theirs = ([], after) if words[0] == "trl" else without_options(after, words[0])
    raise UsageError(
        f"{' '.join(words[:size])} starts ranks by itself, and each rank of this job would do so",
        f"type: {shlex.join(['master_launch', *ours, *kept, *theirs])}",
    )


def is_python(word: str) -> bool:
    return re.fullmatch(r"python[\d.]*", word) is not None


def without_options(words: Sequence[str], launcher: str) -> tuple[list[str], list[str]]:
    """Return what of a launcher's options we have, too, as ours, and the program after them."""
    rest, ours, module = list(words), [], False
    while rest and rest[0].startswith("-") and rest[0] != "--":
        flag, equals, value = rest.pop(0).partition("=")
        flag = flag.replace("_", "-")
        if flag in MODULE:
            module = True
            continue
        if not equals and flag not in ALONE and takes(rest):
            value = rest.pop(0)
        if launcher == "composer" and flag == "-n":
            flag = "--nproc"
        if flag in KEPT and (KEPT[flag] != "--nproc" or value.isdigit()):
            ours += [KEPT[flag], value]
    rest = rest[1:] if rest[:1] == ["--"] else rest
    if rest and is_python(Path(rest[0]).name):
        rest = [word for at, word in enumerate(rest) if at and (at > 1 or word != "-u")]
    return ours, [*(["-m"] if module else []), *rest]


def takes(rest: Sequence[str]) -> bool:
    """Tell whether the next word is the value of an option: no option, and no program."""
    return bool(rest) and not rest[0].startswith("-") and not rest[0].endswith((".py", ".sh"))
