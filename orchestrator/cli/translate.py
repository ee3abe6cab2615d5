"""Understands the flags of torchrun, accelerate, deepspeed and mpirun, or says what to type here.

What stands after `-m MODULE` belongs to the module, as with python and torchrun.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

from orchestrator.common.errors import UsageError
from orchestrator.config.launch import DEFAULT_WARM

TIME = re.compile(r"[0-9]+([.][0-9]+)?[a-z]*")

SAME = {  # of others -> ours, where the values are the same, too
    "--nproc-per-node": "--nproc",
    "--num-gpus": "--nproc",
    **dict.fromkeys(("--num-nodes", "--num-machines"), "--nnodes"),
    "--hostfile": "--nodes",
    "--main-process-port": "--master-port",
    "--start-method": "--start",
    "--shutdown-timeout": "--grace",
}
_ORDER = "the order of the node list numbers the nodes; start the job once, on one machine"
_MASTER = (
    "the first node of the list is the master; ifname= after a node chooses its interface, and"
    " --master-port the port"
)
_MEET = "no rendezvous is needed: the ranks meet at the first node of the list (--master-port)"
_LOGS = "every rank's output is in experiments/NAME/logs; `orchestrator logs --rank N` shows one"
_KIND = "leave it out: what kind of program it is, is seen from the file"
INSTEAD = {
    **dict.fromkeys(("--node-rank", "--machine-rank"), _ORDER),
    **dict.fromkeys(("--master-addr", "--main-process-ip", "--local-addr"), _MASTER),
    **dict.fromkeys(
        ("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--same-network"), _MEET
    ),
    **dict.fromkeys(("--log-dir", "--redirects", "-r", "--tee", "-t", "--logs-specs"), _LOGS),
    **dict.fromkeys(("--duplicate-stdout-filters", "--duplicate-stderr-filters"), _LOGS),
    "--log-line-prefix-template": "leave it out: each line begins with its node and rank",
    "--print-completion": 'type: eval "$(_MASTER_LAUNCH_COMPLETE=bash_source master_launch)"',
    "--event-log-handler": "leave it out: events.jsonl and job.json of each job have its events",
    "--numa-binding": "leave it out, and bind the ranks in the program (os.sched_setaffinity)",
    "--signals-to-handle": "leave it out: SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 reach the"
    " ranks",
    "--virtual-local-rank": "leave it out: LOCAL_RANK is the rank's number on its node",
    **dict.fromkeys(("--no-python", "--run-path"), _KIND),
    "--standalone": "leave it out: a node list with one machine is such a job",
    "--monitor-interval": "leave it out: the end of a rank is reported within milliseconds",
    "--local-ranks-filter": "--rank N shows the lines of one rank",
    "--role": "leave it out: all ranks have the same role",
    "--use-env": "leave it out: LOCAL_RANK is always in the environment",
    "--num-processes": "--nproc N starts N ranks on each node, not on all of them together",
    "--np": "--nproc N starts N ranks on each node, not on all of them together",
    "-np": "--nproc N starts N ranks on each node, not on all of them together",
    "-n": "--nproc N starts N ranks on each node, not on all of them together",
    **dict.fromkeys(
        ("--host", "-H", "--include", "--exclude"), "write the nodes into a list: --nodes FILE"
    ),
    "--config-file": "--config FILE is for our own settings, --accelerate-config FILE for those of"
    " accelerate",
    "--multi-gpu": "leave it out: there is a rank for each GPU",
}


def ours(command: click.Command, arguments: Sequence[str]) -> list[str]:
    """Return the arguments as `command` knows them; what is the program's own stays as it is."""
    known = {
        flag: option
        for option in command.params
        if isinstance(option, click.Option)
        for flag in (*option.opts, *option.secondary_opts)
    }
    rest, words = list(arguments), []
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        flag, equals, value = rest.pop(0).partition("=")
        if flag.startswith("-m") and "-m" in known:
            flag, value = "-m", flag[2:] + equals + value
            words.append(flag + value)
            equals = value
        else:
            flag = translated(flag, known)
            words.append(flag + equals + value)
        option = known.get(flag)
        if flag == "--warm" and option is not None:
            words[-1] = warm_with_its_time(value, rest)
            continue
        if option is not None and not option.is_flag and not equals and rest:
            words.append(rest.pop(0))
        if flag in ("-m", "--module") and option is not None:
            return [*words, *([] if rest[:1] == ["--"] else ["--"]), *rest]
    return [*words, *rest]


def warm_with_its_time(value: str, rest: list[str]) -> str:
    """Return --warm with the time after it, or with the usual one: a script is no time."""
    if not value and rest and TIME.fullmatch(rest[0]):
        value = rest.pop(0)
    return f"--warm={value or DEFAULT_WARM}"


def translated(flag: str, known: dict[str, click.Option]) -> str:
    """Return an option of ours, however it is spelled; say what to do in place of another's."""
    if flag in known:
        return flag
    dashed = flag.replace("_", "-")
    dashed = SAME.get(dashed, dashed)
    if dashed in known:
        return dashed
    if dashed in INSTEAD:
        raise UsageError(f"{flag} is no option here", INSTEAD[dashed])
    return flag
