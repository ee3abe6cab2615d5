import json
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.common.errors import CheckFailed
from orchestrator.config.launch import Launch, Where
from orchestrator.config.schema import Config, DistributedConfig, FsdpConfig, NcclConfig
from orchestrator.head.nodes.facts import ProbedNode
from orchestrator.head.nodes.node_list import parse_nodes
from orchestrator.head.plan import plan
from orchestrator.head.plan.dry_run import plan_to_json, plan_to_text, quote_word, shell_lines
from orchestrator.head.plan.model import EnvSetting, Plan
from orchestrator.head.plan.request import LaunchRequest
from orchestrator.protocol.spec import Target
from tests.head.plan.probed import facts

AUTO = Target("auto", "train.py", ())


def program(kind: str, name: str = "train.py") -> Target:
    return Target(kind=kind, name=name)


def found(list_text: str, **fields: Any) -> list[ProbedNode]:
    """Machines 10.0.0.1, .2, ... for the lines of a list; the first has the port."""
    machines = []
    for number, node in enumerate(parse_nodes(list_text, "list"), 1):
        machine = facts(f"eth0 10.0.0.{number}/24", hostname=node.host, **fields)
        machines.append(ProbedNode(node, machine, f"10.0.0.{number}"))
    machines[0] = replace(machines[0], facts=machines[0].facts.replace(port=29500))
    return machines


def change(machines: list[ProbedNode], index: int, **fields: Any) -> list[ProbedNode]:
    one = machines[index]
    machines[index] = replace(one, facts=one.facts.replace(**fields))
    return machines


def settings_of(env: dict[str, str]) -> list[EnvSetting]:
    return [EnvSetting(name, value, "--env", yours=True) for name, value in env.items()]


def make(
    machines: Sequence[ProbedNode],
    target: Target = AUTO,
    *,
    env: dict[str, str] | None = None,
    config: Config | None = None,
    **launch: Any,
) -> Plan:
    config = config or Config(launch=Launch(**launch))
    request = LaunchRequest(Where(), config, target, tuple(settings_of(env or {})), ())
    return plan.plan_job(request, machines, "job", "/experiment")


# -- ranks ------------------------------------------------------------------------------------


def test_plan_of_two_nodes() -> None:
    made = make(found("a\nb"), nproc=2)
    assert (made.world_size, made.master_address, made.master_port) == (4, "10.0.0.1", 29500)
    assert (made.start, made.notes, made.spares) == ("fork", (), ())
    assert [node.agent for node in made.nodes] == [
        (
            *(
                "/usr/bin/python3",
                "-u",
                "/home/bob/.orchestrator/lib/0123/orchestrator/node/job/ranks/fast_torchrun.py",
            ),
            *("--nproc-per-node=2", f"--local-addr=10.0.0.{rank + 1}"),
            *("--run-path", "--start-method=fork"),
        )
        for rank in (0, 1)
    ]


def test_ranks_follow_unequal_slots() -> None:
    machines = found("a slots=4\nb slots=1\nc\nd slots=3", gpus=2)
    made = make(machines)
    assert [node.first_rank for node in made.nodes] == [0, 4, 5, 7]
    assert [node.last_rank for node in made.nodes] == [3, 4, 6, 9]
    assert [node.env["NPROC_PER_NODE"] for node in made.nodes] == ["4", "1", "2", "3"]
    assert made.world_size == 10
    (note,) = made.notes
    assert note == "nodes have different numbers of ranks (a: 4, b: 1, c: 2, d: 3)"


@pytest.mark.parametrize(
    ("line", "gpus", "nproc", "count", "why"),
    [
        ("a slots=3", 8, 2, 2, "--nproc"),
        ("a slots=2", 8, 2, 2, "--nproc"),
        ("a slots=3", 8, None, 3, "slots= in the list"),
        ("a", 8, 2, 2, "--nproc"),
        ("a", 8, None, 8, "8 GPUs found"),
        ("a", 0, None, 1, "no GPU found"),
    ],
)
def test_rank_count_has_reason(
    line: str, gpus: int, nproc: int | None, count: int, why: str
) -> None:
    made = make(found(line, gpus=gpus), nproc=nproc)
    assert (made.nodes[0].nproc, made.nodes[0].nproc_why) == (count, why)
    overruled = (
        ["--nproc 2 wins over slots= in the list (a)"] if (line, nproc) == ("a slots=3", 2) else []
    )
    assert [note for note in made.notes if "--nproc" in note] == overruled


def test_no_torchrun_plan_runs_program_directly() -> None:
    made = make(found("a\nb"), Target("auto", "train.py", ("--", "x")), nproc=1, no_torchrun=True)
    assert made.start == "plain"
    (agent,) = {node.agent[2].rpartition("/")[2] for node in made.nodes}
    assert agent == "no_torchrun.py"
    name, *places, python, unbuffered, script, dash, word = made.nodes[1].paste
    assert places == ["MASTER_ADDR=10.0.0.1", "MASTER_PORT=29500", "RANK=1", "WORLD_SIZE=2"]
    assert (name, python, unbuffered, dash, word) == ("env", "/usr/bin/python3", "-u", "--", "x")
    assert script.endswith("/train.py")


ENGINE = Target("engine", plan.ENGINE, ())


@pytest.mark.parametrize(
    ("listed", "gpus", "settings", "words"),
    [
        (
            "a slots=2\nb slots=1",
            0,
            {},
            "all nodes need the same number of ranks; here they have 2, 1",
        ),
        ("a slots=2\nb slots=1", 0, {"fsdp": FsdpConfig("full_shard")}, ""),
        (
            "a slots=2\nb slots=2",
            0,
            {"fsdp": FsdpConfig(shard_size=3)},
            "does not divide the 4 ranks",
        ),
        # A single rank has no shards.
        ("a", 1, {"fsdp": FsdpConfig(shard_size=3)}, ""),
        ("a slots=2", 0, {"fsdp": FsdpConfig(cpu_offload=True)}, "no GPU to offload from on a"),
        # The engine ignores the option there.
        ("a slots=1", 0, {"fsdp": FsdpConfig(cpu_offload=True)}, ""),
        ("a slots=2", 2, {"fsdp": FsdpConfig(cpu_offload=True)}, ""),
        ("a", 0, {"distributed": DistributedConfig(backend="nccl")}, "is nccl, but a has no GPU"),
    ],
)
def test_engine_settings_that_do_not_fit_are_refused(
    listed: str, gpus: int, settings: dict[str, Any], words: str
) -> None:
    machines = found(listed, gpus=gpus)
    # A user's own program reads no such key.
    make(machines, config=Config(**settings))
    if not words:
        make(machines, ENGINE, config=Config(**settings))
        return
    with pytest.raises(CheckFailed, match=words):
        make(machines, ENGINE, config=Config(**settings))


# -- the port ---------------------------------------------------------------------------------


def test_taken_port_is_noted() -> None:
    made = make(change(found("a\nb"), 0, port=29503))
    assert made.master_port == 29503
    assert made.notes == ("port 29500 is taken on a: using 29503",)


@pytest.mark.parametrize(
    ("wanted", "words"), [(None, "no port from 29500 on is free"), (4000, "port 4000 is taken")]
)
def test_missing_port_is_refused(wanted: int | None, words: str) -> None:
    with pytest.raises(CheckFailed, match=f"{words} on the master a") as failed:
        make(change(found("a"), 0, port=0), master_port=wanted)
    assert "--master-port" in failed.value.fix


# -- fork or plain ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "torch", "start", "note"),
    [
        ("script", "2.9.1+cu128", "fork", ""),
        ("script", "2.10.0a0+git1234", "fork", ""),
        ("script", "2.1.0", "fork", ""),
        ("script", "2.0.1", "plain", "torch 2.0.1 on a is too old"),
        ("script", "1.13.1", "plain", "torch 1.13.1 on a is too old"),
        ("script", "unknown", "plain", "torch unknown on a is too old"),
        ("engine", "2.9.1", "fork", ""),
        ("module", "2.9.1", "fork", ""),
        ("program", "2.9.1", "plain", "train.py is a program, no script or module of Python"),
    ],
)
def test_fork_start_is_used_only_if_safe(kind: str, torch: str, start: str, note: str) -> None:
    target = Target("auto" if kind in ("script", "program") else kind, "train.py", ())
    machines = found("a\nb", target=program(kind), torch=torch)
    made = make(machines, target)
    assert made.start == start
    assert made.notes == ((f"plain start: {note}",) if note else ())
    assert ("--run-path" in made.nodes[0].agent) == (start == "fork")
    assert ("PYTORCH_NVML_BASED_CUDA_CHECK" in made.nodes[0].env) == (start == "fork")
    # Asked for, plain needs no reason.
    plain = make(machines, target, start="plain")
    assert (plain.start, plain.notes) == ("plain", ())


def test_old_torch_disables_fork_and_mixed_versions_warn() -> None:
    made = make(change(found("a\nb"), 1, torch="2.0.0"))
    assert made.start == "plain"
    assert made.notes[-1] == (
        "WARNING: nodes have different versions of torch (a: 2.9.1+cu128, b: 2.0.0)"
    )


# -- checks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"workdir_exists": False, "workdir": "/gone"},
            "there is no directory /gone (1 of 3 nodes: b)",
        ),
        ({"target": program("missing", "/w/x.py")}, "script not found: /w/x.py (1 of 3 nodes: b)"),
        ({"target": program("unreadable", "/x.py")}, "/x.py is unreadable (1 of 3 nodes: b)"),
        ({"target": program("not executable", "/x")}, "/x is not executable (1 of 3 nodes: b)"),
        ({"target": program("program")}, "not the same on all nodes (b: program; a, c: script)"),
        ({"torch": ""}, "there is no torch on: b (/usr/bin/python3)"),
    ],
)
def test_node_that_is_not_ready_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckFailed) as failed:
        make(change(found("a\nb\nc"), 1, **fields))
    assert words in failed.value.what


NO_TORCH = "orchestrator bootstrap torch numpy   makes an environment with it on every node"
NEWEST = "~/.orchestrator/environments/newest/bin/python"


@pytest.mark.parametrize(
    ("pythons", "words"),
    [
        ([(), ()], NO_TORCH),
        ([("/a/bin/python",), ("/b/bin/python",)],
         "these have it, as lines of the list: a python=/a/bin/python; b python=/b/bin/python"),
        ([(NEWEST,), (NEWEST, "/a/bin/python")],
         "orchestrator bootstrap made an environment with it there: --activate bootstrap"),
        ([("/a b/bin/python", "/$(evil)/python"), ()], NO_TORCH),
    ],
)  # fmt: skip
def test_pythons_with_torch_are_suggested(pythons: list[tuple[str, ...]], words: str) -> None:
    nodes = found("a\nb", torch="")
    for index, paths in enumerate(pythons):
        nodes = change(nodes, index, torch_elsewhere=paths)
    with pytest.raises(CheckFailed) as failed:
        make(nodes)
    assert failed.value.fix.startswith(words)


MISSING = program("missing", "/w/x.py")


@pytest.mark.parametrize(
    ("everywhere", "fields", "fix"),
    [
        (True, {"target": MISSING}, "check its spelling"),
        (False, {"target": MISSING}, "copy it"),
        (True, {"target": MISSING, "workdir_exists": False, "workdir": "/gone"}, "copy it"),
        (False, {"target": program("not executable", "/x")}, "chmod +x"),
    ],
)
def test_program_missing_everywhere_is_called_misspelt(
    everywhere: bool, fields: dict[str, Any], fix: str
) -> None:
    machines = found("a\nb", **fields) if everywhere else change(found("a\nb"), 1, **fields)
    with pytest.raises(CheckFailed) as failed:
        make(machines)
    assert fix in failed.value.fix


def test_engine_needs_no_workdir() -> None:
    made = make(found("a", workdir="/gone", workdir_exists=False), Target("engine", "", ()))
    assert made.nodes[0].workdir == "/"
    assert made.nodes[0].target == Target("engine", "orchestrator.engine.train", ())


# -- the environment --------------------------------------------------------------------------


def test_environment_merges_in_order() -> None:
    """Order: computed, config, --env. The variables of a rank's identity cannot be changed."""
    config = Config(
        nccl=NcclConfig(variables={"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "config"}),
        env={"A": "config", "B": "config", "NODE_RANK": "7"},
    )
    env = {"B": "user", "GLOO_SOCKET_IFNAME": "user", "ORCHESTRATOR_JOB": "user"}
    node = make(found("a\nb"), config=config, env=env).nodes[1]
    assert node.env == {
        "NCCL_SOCKET_IFNAME": "config",
        "GLOO_SOCKET_IFNAME": "user",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "NCCL_DEBUG": "INFO",
        "A": "config",
        "B": "user",
        "NODE_RANK": "1",
        "NODE_IP": "10.0.0.2",
        "NNODES": "2",
        "NPROC_PER_NODE": "1",
        "ORCHESTRATOR_JOB": "job",
        "ORCHESTRATOR_EXPERIMENT": "/experiment",
    }


@pytest.mark.parametrize(
    ("count", "there", "value"), [(2, None, "1"), (1, None, None), (2, "4", None)]
)
def test_omp_num_threads_follows_torchrun(count: int, there: str | None, value: str | None) -> None:
    made = make(found("a", omp_num_threads=there), nproc=count)
    assert made.nodes[0].env.get("OMP_NUM_THREADS") == value


# -- showing it -------------------------------------------------------------------------------

NASTY = (
    *("--", "-x", "--nnodes=9", "a b", "", "'", '"', "`id`", "$(id)", "$HOME", "*", "?", "~"),
    *("\\", "\\n", "a\nb", "\n", "\t", "!x", "#x", "a;b", "a&b", "a|b", "<a>", "(a)", "{a,b}"),
    *("é漢😀", "\x01\x7f\x1b[0m", "\udcff\udc80", "=", "a=b", "-", "--", "[a-z]", "%s", " "),
)


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A python that says what it is given: arguments, place, environment; each ends with a NUL."""
    program = tmp_path_factory.mktemp("it's a $bin") / "python"
    program.write_text('#!/bin/sh\nprintf \'%s\\0\' "$#" "$@" "$PWD"\nexec env -0\n')
    program.chmod(0o755)
    return str(program)


def pasted(made: Plan, index: int, shell: str = "bash") -> tuple[list[str], str, dict[str, str]]:
    """(arguments, directory, environment) of what the lines of the plan run."""
    lines = "\n".join(shell_lines(made, made.nodes[index]))
    env = {"PATH": "/usr/bin:/bin", "GONE": "1", "PYTHONPATH": "before"}
    done = subprocess.run([shell, "-c", lines], stdout=subprocess.PIPE, check=True, env=env)
    said = [word.decode("utf-8", "surrogateescape") for word in done.stdout.split(b"\0")[:-1]]
    count = int(said[0])
    environment = dict(word.partition("=")[::2] for word in said[count + 2 :])
    return said[1 : count + 1], said[count + 1], environment


@pytest.mark.parametrize("word", ["=eth0", "a=b", "~", "$x", "it's", ""])
def test_quoted_word_is_safe_for_zsh(word: str) -> None:
    """There is no zsh here: what it would replace by a program's path, =eth0, stands in quotes."""
    text = quote_word(word)
    assert shlex.split(text) == [word]
    assert not text.startswith(("=", "~", "$"))


def test_pasted_lines_leave_no_variable(echo: str, tmp_path: Path) -> None:
    """Programs started later in that shell would otherwise pass for the job's."""
    machines = found("a\nb", python=echo, workdir=str(tmp_path), target=program("script"))
    made = make(machines, AUTO)
    lines = "\n".join([*shell_lines(made, made.nodes[0]), "printf MARK; env -0"])
    env = {"PATH": "/usr/bin:/bin"}
    said = subprocess.run(["sh", "-c", lines], stdout=subprocess.PIPE, check=True, env=env).stdout
    before, _, after = said.partition(b"MARK")
    assert b"ORCHESTRATOR_JOB=" in before and b"ORCHESTRATOR" not in after


@pytest.mark.parametrize("shell", ["bash", "sh"])
@pytest.mark.parametrize("start", ["fork", "plain"])
@pytest.mark.parametrize("kind", ["script", "module", "program", "engine"])
def test_dry_run_can_be_pasted(
    echo: str, tmp_path: Path, shell: str, start: str, kind: str
) -> None:
    workdir = tmp_path / "my $dir 'x'"
    workdir.mkdir()
    name = {"script": "sub/train it.py", "program": "./run it"}.get(kind, "train")
    machines = found("a\nb", python=echo, workdir=str(workdir), target=program(kind, name))
    target = Target("auto" if kind in ("script", "program") else kind, name, NASTY)
    env = {f"V{number}": word for number, word in enumerate(NASTY)}
    made = make(machines, target, env=env, start=start)
    node = replace(made.nodes[1], unset=("GONE",))
    made = replace(made, nodes=(made.nodes[0], node))
    words, where, environment = pasted(made, 1, shell)
    assert words == list(node.paste[1:])
    assert words[-len(NASTY) :] == list(NASTY)
    assert where == str(workdir)
    assert {name: environment.get(name) for name in node.env} == node.env
    assert "GONE" not in environment
    first = {"script": f"{workdir}/sub", "engine": node.library}
    if kind == "engine" or (kind == "script" and start == "fork"):
        assert environment["PYTHONPATH"] == f"{first[kind]}:before"
    else:
        assert environment["PYTHONPATH"] == "before"


text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@given(args=st.lists(text, max_size=5), value=text)
@settings(max_examples=8, deadline=None)
def test_any_argument_survives_pasting(echo: str, args: list[str], value: str) -> None:
    machines = found("a", python=echo, workdir="/")
    made = make(machines, Target("auto", "train.py", tuple(args)), env={"VALUE": value})
    words, _, environment = pasted(made, 0)
    assert words[len(words) - len(args) :] == args
    assert environment["VALUE"] == value


def test_torchrun_parses_pasted_command() -> None:
    """Its own parser, which would swallow a first `--`, gives the program its arguments back."""
    from torch.distributed.run import parse_args

    made, wanted = [], []
    for args in (NASTY, NASTY[1:], ("--",), ("--", "--", "-m"), (), ("--help",)):
        for kind in ("script", "module", "program", "engine"):
            target = Target("auto" if kind in ("script", "program") else kind, "train", args)
            machines = found("a\nb", target=program(kind, "train"))
            node = make(machines, target).nodes[1]
            made.append(node.paste[4:])
            script = plan.script_path(node.target, node.workdir, node.library)
            wanted.append(
                {
                    "training_script": "train" if kind in ("module", "program") else script,
                    "training_script_args": list(args),
                    "node_rank": 1,
                    "nnodes": "2",
                    "master_addr": "10.0.0.1",
                    "master_port": 29500,
                    "module": kind == "module",
                    "no_python": kind == "program",
                    "run_path": kind in ("script", "engine"),
                }
            )
    parsed = [vars(parse_args(words)) for words in made]
    assert [{name: one[name] for name in wanted[0]} for one in parsed] == wanted


def test_to_text_shows_plan() -> None:
    machines = change(found("a slots=2\nb slots=1"), 0, port=29501)
    text = plan_to_text(replace(make(machines), spares=("c",)))
    head, first, second = text.rstrip("\n").split("\n\n")
    assert head.splitlines() == [
        "# 2 nodes, 3 ranks, fork start, master 10.0.0.1:29501",
        "# note: port 29500 is taken on a: using 29501",
        "# note: nodes have different numbers of ranks (a: 2, b: 1)",
        "# spare: c",
    ]
    assert first.startswith("# node 0: a (ranks 0-1: slots= in the list)\ncd /job\n")
    assert second.startswith("# node 1: b (rank 2: slots= in the list)\n")
    assert second.endswith("--run-path --start-method=fork /job/train.py")


def test_to_text_keeps_node_text_in_comments() -> None:
    """A version of torch, a name of a spare, a variable: none of them becomes a command."""
    made = make(found("a"))
    setting = replace(made.nodes[0].settings[0], name="A;halt", value="1\nhalt")
    lying = replace(
        made,
        notes=("torch 2\nrm -rf ~\r\nrm -rf /",),
        spares=("c\nhalt",),
        nodes=(replace(made.nodes[0], settings=(setting,), unset=("B\nhalt",), paste=("true",)),),
    )
    shell = subprocess.run(
        [
            "bash",
            "-c",
            f"halt() {{ echo called; }}; rm() {{ echo called; }}\n{plan_to_text(lying)}",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "called" not in shell.stdout
    assert "# note: torch 2 rm -rf ~ rm -rf /" in plan_to_text(lying)


def test_to_json_shows_plan() -> None:
    made = make(found("a slots=2\nb slots=1"), Target("auto", "train.py", ("a b",)))
    data = json.loads(json.dumps(plan_to_json(made)))
    first, second = data["nodes"]
    assert (first["ranks"], second["ranks"]) == ([0, 1], [2])
    assert first["command"] == list(made.nodes[0].paste)
    assert first["env"] == made.nodes[0].env
    assert first["shell"].endswith("/job/train.py 'a b'")
    assert (data["world_size"], data["master_port"], data["start"]) == (3, 29500, "fork")
