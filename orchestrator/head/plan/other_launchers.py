"""Refuses a command that starts ranks by itself, as each rank of the job would do; pure."""

from __future__ import annotations

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


def refuse(program: Sequence[str]) -> None:
    """Refuse such a command, and say what to type here."""
    file = Path(program[0]) if program else Path()
    if file.exists() and file.parent.name != "bin":  # the user's own, with such a name
        return
    words = [Path(program[0]).name, *program[1:]]
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
