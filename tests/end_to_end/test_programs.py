"""Random programs, run by torchrun typed by hand on each node, and by us: no difference is seen.

tests/node/job/test_programs.py runs many more of them, without torchrun.
"""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from orchestrator.node.job import processes
from tests.conftest import Cluster
from tests.launching import PATIENCE, Head
from tests.node.running import PYTHON, streams
from tests.programs import Program, comparable, programs

pytestmark = pytest.mark.cluster

numbers = itertools.count()


@given(program=programs())
@settings(
    max_examples=8,
    derandomize=True,
    phases=[Phase.generate],  # an example takes half a minute: none of them is made smaller
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_program_does_what_it_does_under_torchrun(
    two_nodes: Cluster, tmp_path: Path, program: Program
) -> None:
    directory = tmp_path / str(next(numbers))
    directory.mkdir()
    (directory / "program.py").write_text(program.text)
    # The end of one rank ends the others, sooner or later: one that fails is alone.
    nodes = 2 if program.good else 1
    (directory / "nodes").write_text("\n".join(two_nodes.addresses[:nodes]) + "\n")
    wanted = by_torchrun(two_nodes, directory, nodes, program)
    for start in ("fork", "plain"):
        seen = by_us(Head(two_nodes, directory), start, nodes, program)
        assert seen == wanted, start


def by_torchrun(
    cluster: Cluster, directory: Path, nodes: int, program: Program
) -> tuple[int, dict[int, int], dict[int, bytes]]:
    """The exit code, the codes of the ranks and what each rank printed."""
    mark = f"{directory}/out."

    def typed(node: int) -> subprocess.CompletedProcess[str]:
        torchrun = (
            f"{PYTHON} -m torch.distributed.run --nnodes {nodes} --node-rank {node}"
            f" --nproc-per-node 1 --master-addr {cluster.addresses[0]} --master-port 29778"
        )
        setting = f"cd {directory} && export CONTROL={mark} OMP_NUM_THREADS=1"
        return cluster.ssh(node, f"{setting}; {torchrun} program.py", timeout=PATIENCE)

    with ThreadPoolExecutor(nodes) as pool:
        ends = list(pool.map(typed, range(nodes)))
    for pid, process in processes.everyone().items():  # what it left behind
        if f"CONTROL={mark}".encode() in processes.environment(pid):
            processes.send(process, signal.SIGKILL)
    codes = dict.fromkeys(range(nodes), 0)
    for found in re.finditer(r"rank *: (\d+) .*\n *exitcode *: (-?\d+)", ends[0].stderr):
        codes[int(found[1])] = 130 if int(found[2]) == -signal.SIGINT else int(found[2])
    outputs = {
        rank: comparable(Path(f"{mark}{rank}").read_bytes(), program.text)
        if Path(f"{mark}{rank}").exists()
        else b""
        for rank in range(nodes)
    }
    return max(end.returncode for end in ends), codes, outputs


def by_us(
    head: Head, start: str, nodes: int, program: Program
) -> tuple[int, dict[int, int], dict[int, bytes]]:
    listed = [
        "--nodes",
        str(head.directory / "nodes"),
        "--nproc",
        "1",
        "--set",
        f"launch.start={start}",
    ]
    command = head.launch(*listed, "program.py")
    code = command.finish()
    assert head.nothing_left(), command.text
    codes, outputs = {}, {}
    for node in range(nodes):
        (ranks,) = (head.experiment / "logs").glob(f"node_{node}_*.ranks")
        said = streams(head.log(node), ranks.read_bytes())
        outputs[node] = comparable(said.get(str(node), b""), program.text)
        codes[node] = head.record["nodes"][node]["ranks"][str(node)]["code"]
    return code, codes, outputs
