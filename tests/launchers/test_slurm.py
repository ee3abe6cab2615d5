"""Jobs through a real Slurm: in an allocation, submitted, stopped, requeued, and by srun alone."""

import json
import signal
import sys

import pytest

from tests.launchers.conftest import Login
from tests.launching import BIN, PATIENCE
from tests.node.running import wait_until

TICKS = """
import sys, time
print("begun with", sys.argv[1:], flush=True)
for i in range(600):
    print("tick", i, flush=True)
    time.sleep(0.1)
"""
# Counts its steps, keeps the last one when it is asked to stop, and goes on from there.
KEEPS = """
import os, signal, sys, time
kept = os.path.join(os.environ["ORCHESTRATOR_EXPERIMENT"], "outputs", "step")
step = int(open(kept).read()) if os.path.exists(kept) else 0
def keep(*_):
    os.makedirs(os.path.dirname(kept), exist_ok=True)
    print(step, file=open(kept, "w"), end="", flush=True)
    print(f"saved step {step}", flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, keep)
if step:
    print(f"resuming after step {step}", flush=True)
while True:
    step += 1
    print("step", step, flush=True)
    time.sleep(0.2)
"""


@pytest.mark.cluster
def test_allocation_gives_nodes(login: Login) -> None:
    """No list, no option: the nodes are Slurm's, and the arguments arrive as they are."""
    words = ["two words", 'it\'s "quoted" $HOME', ""]
    text = "import os, sys; print('in', os.environ['SLURM_JOB_ID'], sys.argv[1:])"
    command = login.inside("--no-torchrun", login.script(text), *words)
    assert command.finish() == 0, command.text
    record = login.record
    assert (record["state"], record["exit_code"]) == ("done", 0)
    assert [node["name"] for node in record["nodes"]] == ["n1", "n2"]
    for node in (0, 1):
        assert f"in {record['slurm_job']} {words}" in login.log(node)


CALLS = """
from orchestrator import Cluster

def work(x):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    return dist.get_rank(), total.item() * x

print(Cluster().run(work, 5))
"""


@pytest.mark.cluster
def test_python_program_uses_allocation(login: Login) -> None:
    program = login.script(CALLS, "calls.py")
    command = login.command("salloc", "--quiet", "--nodes=2", sys.executable, program)
    assert command.finish() == 0, command.text
    assert command.lines[-1] == "[(0, 15), (1, 15)]"


@pytest.mark.cluster
def test_abandoned_job_is_attached_and_stopped(login: Login) -> None:
    """The head goes by kill -9; the step holds the job, and a second step finds it."""
    login.slurm.run("salloc", "--no-shell", "--nodes=2")
    job = login.slurm.said("squeue", "-h", "-o", "%i")
    inside = {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "n[1-2]"}
    words = ("--nnodes", "1", "--no-torchrun", login.script(TICKS))
    command = login.command(str(BIN / "master_launch"), *words, **inside)
    command.wait_for("tick 2")
    command.interrupt(signal.SIGKILL)
    shown = len(login.log(0))
    status = login.typed("status", "--json")
    assert status.finish() == 0, status.text
    told = json.loads(status.text)
    assert told["slurm"] == {"job": job, "state": "RUNNING", "reason": "None"}
    assert [node["state"] for node in told["nodes"]] == ["running"]
    attached = login.typed("attach")
    attached.wait_for("tick")
    stop = login.typed("stop")
    assert stop.finish() == 0, stop.text
    assert stop.text.count("nothing left") == 1
    assert attached.finish() == 130, attached.text
    assert len(login.log(0)) > shown
    ticks = [line for line in login.log(0).splitlines() if line.startswith("tick")]
    assert ticks == [f"tick {number}" for number in range(len(ticks))]
    assert login.slurm.queue() == f"{job} RUNNING", "the allocation is the user's"


@pytest.mark.cluster
def test_submitted_job_requeues_at_time_limit_and_resumes(login: Login) -> None:
    """Slurm's signal before the limit makes the ranks save, and the next attempt resumes; `status`,
    `logs` and `stop` work from the login node.
    """
    secret = ["--env", "PIN=hunter2"]
    options = ("--nnodes", "1", "--time", "30", "--no-torchrun", *secret)
    command = login.typed("submit", "slurm", *options, login.script(KEEPS))
    command.wait_for("step 5")
    status = login.typed("status")
    assert status.finish() == 0
    assert "running, 1 node, Slurm's job" in status.text
    for file in ("batch.sh", "job.json", "manifest.json", "config.yaml"):
        assert "hunter2" not in (login.experiment / file).read_text()
    job = login.record["slurm_job"]
    login.slurm.run("scancel", "--batch", "--signal=USR1", job)
    step = command.wait_for(r"saved step (\d+)")[1]
    command.wait_for("goes back into the queue")
    wait_until(lambda: f"{job} PENDING" in login.slurm.queue(), "the queue", PATIENCE)
    assert login.record["state"] == "queued"
    status = login.typed("status")
    assert status.finish() == 0
    assert "queued" in status.text
    # Slurm itself holds it for a few seconds, so that nothing late of the first attempt is taken
    # for the second one's.
    command.wait_for(f"resuming after step {step}")
    stop = login.typed("stop")
    assert stop.finish() == 0, stop.text
    assert "ended, nothing left" in stop.text
    assert command.finish() == 130, command.text
    assert login.slurm.run("squeue", "-h", "-j", job).stdout == ""
    assert len(list((login.directory / "experiments").glob("[!.]*"))) == 1
    logs = login.typed("logs")
    assert logs.finish() == 0
    assert "resuming after" in logs.text


@pytest.mark.cluster
def test_srun_alone_makes_ranks(login: Login) -> None:
    text = "from orchestrator.distributed import setup_distributed; print(setup_distributed())"
    step = ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", str(BIN / "python")]
    command = login.command(*step, login.script(text))
    assert command.finish() == 0, command.text
    assert "ranks from Slurm: 2 tasks of srun, master 127.0.0.1:" in command.text
    for rank in range(2):
        assert f"'rank': {rank}, 'world_size': 2, 'local_rank': 0" in command.text
        assert f"'node_rank': {rank}, 'num_nodes': 2" in command.text


@pytest.mark.cluster
def test_missing_allocation_is_refused(login: Login) -> None:
    launch, script = str(BIN / "master_launch"), login.script(TICKS)
    outside = login.command(launch, "--nodes-from", "slurm", script)
    assert outside.finish() == 3
    assert "not inside an allocation" in outside.text
    twice = login.command("srun", "--nodes=2", "--quiet", launch, script)
    assert twice.finish() == 3
    assert "srun started this command 2 times" in twice.text
    assert not (login.directory / "experiments").exists()
