"""Measure from the command to the end of the first all-reduce on all ranks: ours and others'.

    python scripts/bench/launch.py --peers DIR      (peers.py makes DIR, with the others)

Every launcher starts the same program (first_all_reduce.py) on the same hosts with the same torch.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import timeline
from ground import (
    PEERS,
    Cluster,
    Contender,
    Failed,
    Word,
    as_data,
    compete,
    fresh,
    machine,
    our,
    require_root,
    run,
    seconds,
    show,
    table,
    work_directory,
)

PROGRAM = "first_all_reduce.py"
OURS = "master_launch"
TORCHRUNX = """
import sys, torchrunx, first_all_reduce
hosts, ranks, out = sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3]
launcher = torchrunx.Launcher(hostnames=hosts, workers_per_host=ranks, backend="gloo")
launcher.run(first_all_reduce.main, out)
"""
MONARCH = """
import sys
from monarch.actor import Actor, endpoint
from monarch._src.job.job import SSHJob  # it has no public name
from monarch.spmd import setup_torch_elastic_env

class Ranks(Actor):
    @endpoint
    def run(self, place, out):
        import sys
        sys.path.insert(0, place)
        import first_all_reduce
        first_all_reduce.main(out)

hosts, ranks, place, out = sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3], sys.argv[4]
job = SSHJob(python_exe=sys.executable)
job.add_mesh("workers", hosts)
meshes = job.state(cached_path=None)
processes = meshes.workers.spawn_procs(per_host={"gpus": ranks})
setup_torch_elastic_env(processes)
processes.spawn("ranks", Ranks).run.call(place, out).get()
job.kill()
"""
# What no launcher can do without: a login, and one import of torchrun on each node.
IMPORT = """
import gc, json, sys, time
gc.disable()
import torch.distributed.run
now = time.time()
for rank in range(int(sys.argv[1])):
    with open(f"{sys.argv[2]}_{rank}.json", "w") as file:
        json.dump(dict.fromkeys(("program", "torch", "group", "all_reduce"), now), file)
"""
HELP_RUNS = 11


def main() -> None:
    options = parse()
    require_root()
    python = options.peers / "bin/python"
    nodes_python = python if python.exists() else Path(sys.executable)
    if options.profile:
        print("\n\n".join(profile(shape, nodes_python) for shape in options.shapes))
        return
    # Read before the benchmark itself loads the machine.
    about = machine(python)
    results = {}
    for shape in options.shapes:
        nodes, ranks = map(int, shape.split("x"))
        results[shape] = contenders(options.peers, nodes_python, ranks)
        compete(results[shape], nodes, options.repeat, shape)
    helps = [help_seconds() for _ in range(HELP_RUNS)]
    text = f"{render(results)}\n\nmaster_launch --help: {statistics.median(helps):.3f} s"
    data = {"shapes": as_data(results), "help": helps}
    title = f"From the command to the first all-reduce on all ranks (median of {options.repeat})"
    show(options.json, title, about, text, data)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--peers", type=Path, default=PEERS, help="the venv that peers.py made")
    parser.add_argument("--shapes", nargs="+", default=["2x2", "4x2", "2x4"], help="nodes x ranks")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="where our own time goes, instead")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


# -- the contenders -----------------------------------------------------------------------------


def contenders(peers: Path, python: Path, ranks: int) -> list[Contender]:
    theirs = peers / "bin/python"

    def needs(*files: str | Path) -> str:
        lacking = [str(file) for file in files if shutil.which(str(file)) is None]
        return f"missing: {', '.join(lacking)}" if lacking else ""

    def one(name: str, words: Any, missing: str = "") -> Contender:
        return Contender(name, partial(timed, ranks, partial(words, python)), missing)

    return [
        one(OURS, ours),
        one("torchrun by hand over ssh", by_hand, needs("ssh")),
        one("torchrunx", torchrunx, needs(theirs) or lacks(theirs, "torchrunx")),
        one("monarch", monarch, needs(theirs) or lacks(theirs, "monarch._src.job.job")),
        one("deepspeed (pdsh)", deepspeed, needs(peers / "bin/deepspeed", "pdsh")),
        one("the limit: ssh, and torch imported once a node", limit, needs("ssh")),
    ]


def lacks(python: Path, module: str) -> str:
    done = subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False)
    return f"missing: {module}" if done.returncode else ""


def timed(ranks: int, words: Any, cluster: Cluster) -> Mapping[str, float]:
    """Start, wait, read what each rank wrote. All hosts share one clock."""
    work = work_directory(cluster)
    shutil.copy(Path(__file__).with_name(PROGRAM), work)
    out = work / "out"
    out.mkdir()
    command = words(cluster, ranks, out)
    started = time.time()
    said = run(cluster, command).said
    ended = time.time()
    found = [json.loads(path.read_text()) for path in out.iterdir()]
    shutil.rmtree(out)
    if len(found) != cluster.size * ranks:
        print(said, file=sys.stderr)
        raise Failed(f"{len(found)} of {cluster.size * ranks} ranks did the all-reduce")
    steps = {step: max(one[step] for one in found) - started for step in found[0]}
    return {**steps, "exit": ended - started}


def ours(python: Path, cluster: Cluster, ranks: int, out: Path) -> list[Word]:
    words = [*our(OURS), "--nodes", cluster.node_list, "--python", python]
    words += ["--experiments", out.parent / "experiments", "--nproc", str(ranks)]
    return [*words, PROGRAM, out]


def by_hand(python: Path, cluster: Cluster, ranks: int, out: Path) -> list[Word]:
    """Return the command that a user would type into one terminal per node, all at once."""
    there = []
    for number in range(cluster.size):
        torchrun: list[Word] = [python, "-m", "torch.distributed.run", f"--nnodes={cluster.size}"]
        torchrun += [f"--node-rank={number}", f"--nproc-per-node={ranks}"]
        torchrun += [f"--master-addr={cluster.addresses[0]}", "--master-port=29500", PROGRAM, out]
        there.append(torchrun)
    return all_at_once(cluster, out, there)


def limit(python: Path, cluster: Cluster, ranks: int, out: Path) -> list[Word]:
    there: list[list[Word]] = [
        [python, "-c", IMPORT, str(ranks), out / f"node_{i}"] for i in range(cluster.size)
    ]
    return all_at_once(cluster, out, there)


def all_at_once(cluster: Cluster, out: Path, there: Sequence[Sequence[Word]]) -> list[Word]:
    lines = []
    for address, words in zip(cluster.addresses, there, strict=True):
        line = f"cd {out.parent} && {shlex.join(map(str, words))}"
        lines.append(f'ssh {address} {shlex.quote(line)} & all="$all $!"\n')
    return ["bash", "-c", "".join(lines) + "for one in $all; do wait $one || exit 1; done"]


def torchrunx(python: Path, cluster: Cluster, ranks: int, out: Path) -> list[Word]:
    return [python, "-c", TORCHRUNX, ",".join(cluster.addresses), str(ranks), out]


def monarch(python: Path, cluster: Cluster, ranks: int, out: Path) -> list[Word]:
    hosts = ",".join(cluster.addresses)
    return [python, "-c", MONARCH, hosts, str(ranks), out.parent, out]


def deepspeed(python: Path, cluster: Cluster, ranks: int, out: Path) -> list[Word]:
    hostfile = out.parent / "hostfile"
    hostfile.write_text("".join(f"{address} slots={ranks}\n" for address in cluster.addresses))
    words: list[Word] = [python.with_name("deepspeed"), "--hostfile", hostfile]
    words += ["--launcher", "pdsh", "--master_addr", cluster.addresses[0]]
    return [*words, "--no_local_rank", PROGRAM, out]


def help_seconds() -> float:
    started = time.perf_counter()
    subprocess.run([*our(OURS), "--help"], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


# -- where our time goes --------------------------------------------------------------------------


def profile(shape: str, python: Path) -> str:
    """Return the timeline of the second launch on fresh hosts; the first one warms the caches."""
    nodes, ranks = map(int, shape.split("x"))
    with fresh(nodes) as cluster:
        work = work_directory(cluster)
        shutil.copy(Path(__file__).with_name(PROGRAM), work)
        for turn in ("first", "second"):
            out = work / turn
            out.mkdir()
            spans = work / "spans.json"
            words = ours(python, cluster, ranks, out)
            at = words.index("--nodes")
            words = [*words[: at - 1], sys.executable, timeline.__file__, spans, *words[at:]]
            words[-2:-2] = ["--env", "LOGLEVEL=INFO"]
            homes = [cluster.home(i) for i in range(nodes)]
            for home in homes:
                shutil.rmtree(home / ".orchestrator/runs", ignore_errors=True)
            started = time.time()
            run(cluster, words)
        times = [json.loads(path.read_text()) for path in out.iterdir()]
        found = timeline.gather(started, spans, homes, times)
    rows = [[f"{s.begin:.3f}", f"{s.end:.3f}", s.where, s.what] for s in found]
    return f"{shape}\n\n" + table(["from", "to", "where", "what"], rows)


# -- the results --------------------------------------------------------------------------------


def render(results: Mapping[str, Sequence[Contender]]) -> str:
    head = ["launcher"]
    for shape in results:
        head += [shape, "ours is"]
    head += [f"until it returns, {next(iter(results))}"]
    rows = []
    for index, one in enumerate(next(iter(results.values()))):
        row = [one.name]
        for everyone in results.values():
            row += cells(everyone[index], everyone[0])
        rows.append([*row, seconds(one.median("exit"))])
    return table(head, rows)


def cells(one: Contender, reference: Contender) -> list[str]:
    value, best = one.median("all_reduce"), reference.median("all_reduce")
    if value is None:
        return [one.missing, ""]
    found = [sample["all_reduce"] for sample in one.samples]
    shown = f"{value:.2f} s ({min(found):.2f}-{max(found):.2f})"
    return [shown, "" if best is None or one is reference else f"{best / value:.2f}"]


if __name__ == "__main__":
    main()
