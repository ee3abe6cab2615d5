"""A job that fails is started again: its state and files, one log, and an end that is proved."""

import json

from tests.launching import Head

PROGRAM = """
import os, signal, sys, torch.distributed as dist
import orchestrator
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["ORCHESTRATOR_ATTEMPT"])
kept = os.path.join(os.environ["ORCHESTRATOR_RESUME_DIR"], f"kept{rank}")
before = open(kept).read() if os.path.exists(kept) else "nothing"
print("attempt", attempt, "count", os.environ["TORCHELASTIC_RESTART_COUNT"], "kept", before)
with open(kept, "w") as file:
    file.write(f"by attempt {attempt}")
assert os.stat(kept).st_dev != os.stat("/dev/shm").st_dev
dist.barrier()
sys.stdout.write("half a line")
sys.stdout.flush()
if attempt == 2 and rank == 2:
    raise orchestrator.NoRestart("the data are gone")
if attempt == 1 and rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""


def resume_dirs(head: Head) -> list[str]:
    """Return what attempts shared and has not been removed, in memory and on disk."""
    words = ["sh", "-c", "ls -d /dev/shm/orchestrator-*/* 2>/dev/null || true"]
    in_memory = [line for i in (0, 1) for line in head.cluster.exec(i, words).split()]
    homes = {head.cluster.run_home(i) for i in (0, 1)}
    return in_memory + [str(path) for home in homes for path in home.glob("resume/*")]


def test_program_knows_attempt_and_may_refuse_restart(head: Head) -> None:
    script = head.script("program.py", PROGRAM)
    told = head.directory / "told"
    words = ["--max-restarts", "9", "--notify", f"cat >> {told}; sleep 0.1"]
    command = head.launch("--nproc", "2", *words, script).ends(1)
    assert "the data are gone" in command.text and "the program wants no restart" in command.text
    assert command.text.count("attempt 2 count 1 kept by attempt 1") == 4
    assert "not every node sees" not in command.text
    before, line, after = head.log(0).partition(b"\norchestrator: attempt 2 of at most 10 (")
    assert line and b"kept nothing" in before and b"half a line" in before
    assert after.count(b"count 1") == 2
    restart, failure = map(json.loads, told.read_text().splitlines())
    assert (restart["event"], restart["attempt"], restart["verdict"]["rank"]) == ("restart", 2, 3)
    assert (failure["event"], failure["state"], failure["attempt"]) == ("failure", "failed", 2)
    assert head.record["launch"]["notify"] == ["cat (redacted)"]
    assert len(head.record["attempts"]) == 2
    status = head.command("orchestrator", "status").ends()
    assert "attempt 2 of at most 10" in status.text
    assert head.nothing_left() and not resume_dirs(head)


SAVES_ON_RANK_0 = """
import os, signal, socket, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["ORCHESTRATOR_ATTEMPT"])
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
found = {name: open(f"runs/{name}/model.pt").read() for name in sorted(os.listdir("runs"))} \\
    if os.path.isdir("runs") else {}
above = open("../outputs/model.pt").read() if os.path.exists("../outputs") else "nothing"
print("attempt", attempt, "finds", found)
print("attempt", attempt, "finds above", above, flush=True)
if rank == 0:
    other = socket.create_server(place).accept()[0]
    os.makedirs("../outputs", exist_ok=True)
    open("../outputs/model.pt", "w").write(f"that of {attempt}")
    os.makedirs(f"runs/step-{attempt}")
    open(f"runs/step-{attempt}/model.pt", "w").write(f"of {attempt}")
    if attempt > 1:
        os.unlink("runs/latest")
    os.symlink(os.path.abspath(f"runs/step-{attempt}"), "runs/latest")
    if attempt == 2:
        os.rename("runs/step-1", "tmp-old")
    other.sendall(b"x")
else:
    while True:
        try:
            other = socket.create_connection(place)
            break
        except OSError:
            time.sleep(0.02)
    other.recv(1)
if attempt < 3 and rank == attempt - 1:
    os.kill(os.getpid(), signal.SIGKILL)
if attempt == 3:
    print("stays", flush=True)
time.sleep(1000)
"""


def test_files_of_rank_0_reach_all_nodes(apart: Head) -> None:
    script = apart.script("saves.py", SAVES_ON_RANK_0)
    command = apart.launch("--no-torchrun", "--max-restarts", "3", script)
    command.wait_for("stays")
    command.wait_for("stays")
    apart.command("orchestrator", "stop", "--grace", "0").ends()
    assert command.finish() == 130, command.text
    record = apart.record
    assert record["state"] == "stopped" and record["attempt"] == 3
    assert [one["state"] for one in record["attempts"]] == ["failed", "failed", "stopped"]
    assert apart.nothing_left() and not resume_dirs(apart)
    said = (apart.log(0) + apart.log(1)).decode()
    for attempt, names in {1: "{}", 2: "{'latest': 'of 1', 'step-1': 'of 1'}"}.items():
        assert said.count(f"attempt {attempt} finds {names}") == 2, said
    assert b"attempt 3 finds {'latest': 'of 2', 'step-2': 'of 2'}" in apart.log(0)
    # No file is deleted.
    kept = b"{'latest': 'of 2', 'step-1': 'of 1', 'step-2': 'of 2'}"
    assert b"attempt 3 finds " + kept in apart.log(1), said
    for attempt, above in {1: "nothing", 2: "that of 1", 3: "that of 2"}.items():
        assert said.count(f"attempt {attempt} finds above {above}") == 2, said
    kept = apart.experiment / "outputs" / "/".join(apart.directory.parts[-3:-1]) / "outputs"
    assert (kept / "model.pt").read_text() == "that of 3"
    assert command.text.count(": came in ") == 2 and "WARNING" not in command.text
    assert command.text.count("stays on the nodes: orchestrator pull PATH") == 1
