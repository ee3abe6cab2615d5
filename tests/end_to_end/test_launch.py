"""A launch from the list to the record, on two real hosts."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from tests.clusters.netns import NetnsCluster
from tests.launching import Head
from tests.node.running import wait_until

ALL_REDUCE = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * dist.get_rank()
dist.all_reduce(total)
names = "RANK LOCAL_RANK WORLD_SIZE NODE_RANK NNODES NPROC_PER_NODE ORCHESTRATOR_JOB".split()
print("sum", int(total), *(os.environ[name] for name in names), flush=True)
dist.destroy_process_group()
"""
TELL = """
import json, os, sys
if os.environ["RANK"] == "0":
    print("TOLD " + json.dumps({"args": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}))
"""
# What a shell, ssh, argparse or JSON could each bend in its own way.
AWKWARD = [
    *("two words", "it's", 'say "no"', "$(id)", "`id`", "*", "~", "", "--", "-x"),
    *("--master-port=1", "line\nbreak", "tab\there", "back\\slash", "ünï→", "a;b|c&d>e"),
    *("!history", "#no", "{run}", "%h"),
]


def told(head: Head) -> dict[str, object]:
    (line,) = [x for x in head.log(0).decode().splitlines() if x.startswith("TOLD ")]
    found: dict[str, object] = json.loads(line[5:])
    return found


def test_ranks_meet_and_logs_are_fetched(head: Head) -> None:
    first, second = head.cluster.addresses
    head.node_list = head.cluster.write_list([f"{first} slots=1", f"{second} slots=3"])
    command = head.run(head.script("sum.py", ALL_REDUCE))
    job = head.record["job"]
    for node, ranks in ((0, (0,)), (1, (1, 2, 3))):
        lines = set(head.log(node).decode().splitlines())
        expected = {f"sum 6 {r} {r - ranks[0]} 4 {node} 2 {len(ranks)} {job}" for r in ranks}
        assert expected <= lines
        for line in expected:
            assert f"node{node} rank{line.split()[2]} | {line}" in command.lines
        assert head.log(node) == head.node_file(node, "log").read_bytes()
    assert head.nothing_left()
    nodes = head.record["nodes"]
    assert [node["exit_code"] for node in nodes] == [0, 0]
    assert [rank["code"] for node in nodes for rank in node["ranks"].values()] == [0, 0, 0, 0]
    times = json.loads((head.experiment / "manifest.json").read_text())["timeline"]
    moments = [times[name] for name in ("begin", "reached", "synced", "planned", "checked")]
    assert moments == sorted(moments)


def test_launch_works_with_ipv6_alone(
    netns_cluster: Callable[..., NetnsCluster], tmp_path: Path
) -> None:
    head = Head(netns_cluster(2, ipv6=True), tmp_path)
    first, second = head.cluster.addresses
    head.node_list = head.cluster.write_list([f"[{first}]:22 slots=1", f"{second.upper()} slots=1"])
    waits = "import time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
    command = head.launch(head.script("sum.py", ALL_REDUCE + waits), str(tmp_path / "end"))

    def leases() -> list[bool]:
        events = map(json.loads, head.node_file(1, "events.jsonl").read_text().splitlines())
        return [event["active"] for event in events if event["event"] == "lease"]

    command.wait_for("sum 1 1")
    wait_until(leases)
    (tmp_path / "end").touch()
    assert command.finish() == 0, command.text
    assert f"master [{first}]:" in command.text
    assert b"sum 1 0 0 2 0 2 1 " in head.log(0) and b"sum 1 1 0 2 1 2 1 " in head.log(1)
    assert leases() == [True]
    assert head.nothing_left()


def test_program_receives_arguments_and_environment(head: Head) -> None:
    """Arguments byte for byte. computed < config < hook < --env, and who a node is stays."""
    config = head.directory / "c.yaml"
    config.write_text("nccl: {NCCL_DEBUG: WARN}\nenv: {A: config, B: config, C: config}\n")
    hook = head.directory / "scripts/multi_node/config_node.sh"
    hook.parent.mkdir(parents=True)
    hook.write_text(
        "echo noise on stdout; export SEEN=$NODE_RANK/$NODE_IP B=hook C=hook NODE_RANK=7\n"
        'export QUOTED="a \'b\' \\"c\\""\nunset PYTHONUTF8\n'
    )
    options = ["--nnodes", "1", "--set", "launch.start=plain", "--config", str(config)]
    options += ["--env", "C=typed", "--env", "HERE"]
    # The last argument is not UTF-8.
    arguments = [*AWKWARD, "\udcff\udc80a"]
    name = head.script("an odd 'name\".py", TELL)
    head.run(*options, name, *arguments, HERE="from here")
    assert told(head)["args"] == arguments
    env = told(head)["env"]
    assert isinstance(env, dict)
    assert (env["A"], env["B"], env["C"], env["HERE"]) == ("config", "hook", "typed", "from here")
    assert env["NCCL_DEBUG"] == "WARN"
    assert env["QUOTED"] == "a 'b' \"c\""
    address = head.cluster.addresses[0]
    assert (env["NODE_RANK"], env["SEEN"]) == ("0", f"0/{address}")
    assert env["NCCL_SOCKET_IFNAME"] == "=" + env["GLOO_SOCKET_IFNAME"]


def test_record_contains_no_secret(head: Head) -> None:
    """It is in no file of the head, in no dry run, and on the node in the spec alone."""
    (head.directory / "c.yaml").write_text("env: {COPY: see-hunter2-here}\n")
    (head.directory / "f.env").write_text("A=file\nB=file\n")
    options = ("--config", "c.yaml", "--env-file", "f.env", "--env", "B=typed")
    options = (*options, "--env", "WANDB_MODE", "--secret", "MINE", "--env", "PIN=hunter2")
    options = (*options, "--nnodes", "1", "--no-torchrun")
    seen = head.directory / "seen"
    text = f"{TELL}    open({str(seen)!r}, 'w').write(os.environ['MINE'])\n"
    command = (*options, "--name", "first", head.script("tell.py", text), "--key=hunter2", "x")
    given = {"MINE": "hunter2", "WANDB_MODE": "offline"}
    for more in (("--dry-run",), ("--dry-run", "--json")):
        shown = head.run(*more, *command, **given).text
        assert "hunter2" not in shown and "(redacted)" in shown and "offline" in shown
    before = os.umask(0o000)
    try:
        assert "hunter2" not in head.run("--quiet", *command, **given).text
    finally:
        os.umask(before)
    env, args = told(head)["env"], told(head)["args"]
    assert isinstance(env, dict)
    assert (env["A"], env["B"], env["WANDB_MODE"]) == ("file", "typed", "offline")
    assert seen.read_text() == "hunter2"
    seen.unlink()
    assert (env["MINE"], env["PIN"], env["COPY"]) == ("*" * 7, "*" * 7, "see-*******-here")
    assert args == ["--key=*******", "x"]
    assert b"hunter2" in head.node_file(0, "spec.json").read_bytes()
    (experiment,) = head.experiments
    files = [path for path in experiment.rglob("*") if path.is_file()]
    assert not [path for path in files if b"hunter2" in path.read_bytes()]
    assert experiment.name.startswith("first_")
    record = head.record
    assert (record["state"], record["exit_code"], record["verdict"]) == ("done", 0, None)
    assert record["command"][-1] == "x"
    loose = [path for path in (experiment, *experiment.rglob("*")) if path.stat().st_mode & 0o077]
    assert not loose, "others may read it in spite of the umask"
    manifest = (experiment / "manifest.json").read_text()
    assert json.loads(manifest)["nodes"][0]["facts"]["torch"]
    assert "launch:" in (experiment / "config.yaml").read_text()


def test_environment_and_container_surround_job(head: Head) -> None:
    """The ranks have the activated environment, and the job's directories lie inside of it."""
    inside = head.directory / "inside"
    inside.mkdir(mode=0o700)
    (head.directory / "s.sh").write_text("echo noise; export SET_BY=$HOME\n")
    line = f"{{}} wrap=\"env HOME='{inside}'\" activate=script:{head.directory}/s.sh"
    lines = head.node_list.read_text().splitlines()
    head.node_list = head.directory / "nodes.txt"
    head.node_list.write_text("\n".join([line.format(lines[0]), *lines[1:]]) + "\n")
    prefix = Path(sys.executable).parents[1]
    program = head.script("tell.py", TELL)
    options = ("--nnodes", "1", "--no-torchrun", "--activate", f"venv:{prefix}")
    options = (*options, "--python", sys.executable)
    head.run(*options, program)
    env = told(head)["env"]
    assert isinstance(env, dict)
    assert (env["HOME"], env["SET_BY"]) == (str(inside), str(inside))
    run = inside / ".orchestrator/runs" / str(head.record["job"])
    assert run.exists()
    missing = head.launch("--activate", "conda:no-such", program).ends(4)
    assert "1 of 2 nodes cannot be used" in missing.text
    assert "conda:no-such: there is no" in missing.text
    head.command("orchestrator", "prune", "--keep", "0", "--on-nodes", "--yes").ends()
    assert not run.exists()


def test_failing_hook_prevents_start(head: Head) -> None:
    hook = head.directory / "hook.sh"
    hook.write_text("echo no such module >&2\nreturn 3\n")
    command = head.launch("--hook", str(hook), head.script("tell.py", TELL)).ends(3)
    assert "no such module" in command.text and "exit code 3" in command.text
    assert not head.experiments


def test_failed_start_on_one_node_ends_others(head: Head) -> None:
    hook = head.directory / "hook.sh"
    hook.write_text(
        'runs="${ORCHESTRATOR_HOME:-$HOME/.orchestrator}/runs"\n'
        '[ "$NODE_RANK" = 0 ] || { mkdir -p "$runs"; : > "$runs/$ORCHESTRATOR_JOB"; }\n'
    )
    command = head.launch(
        "--no-torchrun", "--hook", str(hook), head.script("x.py", "input()")
    ).ends(4)
    assert "1 of 2 nodes cannot be used; the others were ended again" in command.text
    assert (head.record["state"], head.record["verdict"]["kind"]) == ("failed", "start")
    assert (head.experiment / "manifest.json").exists()
    assert head.nothing_left()


OWN_RANKS = """
import multiprocessing, os, signal, time

def work(rank, world):
    # In one piece: both ranks write into one pipe.
    print(f"rank {rank} of {world} slurm {os.environ['SLURM_PROCID']}", flush=True)

left = [n for n in os.environ if n.startswith(("TORCHELASTIC", "LOCAL_"))]
print("attempt", os.environ["ORCHESTRATOR_ATTEMPT"], "torchrun's", left, flush=True)
node, nodes = int(os.environ["NODE_RANK"]), int(os.environ["NNODES"])
context = multiprocessing.get_context("fork")
ranks = [context.Process(target=work, args=(2 * node + n, 2 * nodes)) for n in (0, 1)]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join()
if os.environ["ORCHESTRATOR_ATTEMPT"] == "1":
    open(f"here{node}", "w").close()
    while node == 1 and not os.path.exists("here0"):
        time.sleep(0.01)
    if node == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
"""


def test_program_with_own_launcher_runs_and_restarts(head: Head) -> None:
    words = ["--no-torchrun", "--set", "launch.rank_env=slurm", "--max-restarts", "1"]
    command = head.run(*words, head.script("own.py", OWN_RANKS))
    for attempt in (1, 2):
        assert command.text.count(f"attempt {attempt} torchrun's []") == 2, command.text
    for rank in range(4):
        assert command.text.count(f"rank {rank} of 4 slurm {rank // 2}") == 2, command.text
    assert head.nothing_left()
