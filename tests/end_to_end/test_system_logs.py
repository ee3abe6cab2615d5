"""Logs for a job that hangs: the head's, and those of its nodes."""

import re
import stat

from tests.launching import Head

PROGRAM = "import os\nprint('here', os.environ['RANK'], flush=True)\n"
SECRET = "v3ry-secret-0815"
STAGES = (
    *("start.launch: launches wait.py", "connecting", "waits for its login shell"),
    *("its server greets", "is asked machine.probe", "answers machine.probe"),
    *("start.selection: chosen of 2 nodes", "plans job", "plan.plan: network:", "checks 2 nodes"),
    *("is recorded in", "starts the supervisors", "all 2 supervisors have started torchrun"),
    *("follows 2 nodes", "event RankEnded", "the job has ended: done, exit code 0"),
)


def found_in_order(text: str, words: tuple[str, ...]) -> list[str]:
    """The first of these words that does not come after those before it, if there is one."""
    at = 0
    for word in words:
        at = text.find(word, at)
        if at < 0:
            return [word]
    return []


def test_head_and_node_logs_record_stages(head: Head) -> None:
    name = head.script("wait.py", PROGRAM)
    words = ["--no-torchrun", "--secret", "API_KEY", name]
    launched = head.run("-v", *words, API_KEY=SECRET)
    assert any("INFO    start.selection: checks 2 nodes" in line for line in launched.lines)
    assert not any("DEBUG" in line for line in launched.lines)
    path = head.experiment / "logs" / "head.log"
    text = path.read_text()
    assert found_in_order(text, STAGES) == []
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # A node that cannot be reached is named, and the others are shown.
    head.cluster.kill_sshd(1)
    try:
        shown = head.command("orchestrator", "logs", "--system").ends(4)
    finally:
        head.cluster.start_sshd(1)
    assert re.search(r"node 1 \(.*\) cannot be asked: ", shown.text)
    assert "node 0" in shown.text and "event rank_started rank=0" in shown.text
    shown = head.command("orchestrator", "logs", "--system").ends()
    system = head.experiment / "logs" / "system"
    for node, address in enumerate(head.cluster.addresses):
        stem = f"node_{node}_{address}"
        supervisor = (system / f"{stem}_supervisor.txt").read_text()
        assert supervisor == head.node_file(node, "supervisor.log").read_text()
        steps = (f"starts node {node} of 2", "torchrun is process", f"rank_ended rank={node}")
        assert found_in_order(supervisor, (*steps, "event ended agent=0")) == []
        server = (system / f"{stem}_server.txt").read_text()
        steps = ("serves a head", "machine.probe", "start.start", "is answered after", "leaves")
        assert found_in_order(server, steps) == []
        assert supervisor in shown.text + "\n" and server in shown.text + "\n"
    for file in head.experiment.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file
    head.command("orchestrator", "stop").ends()
    # The job is over, and a stop does not change that.
    assert path.read_text() == text


def test_stop_and_second_head_are_logged(head: Head) -> None:
    name = head.script("wait.py", f"{PROGRAM}import time\ntime.sleep(1000)\n")
    head.run("--no-torchrun", "--nnodes", "1", "--detach", name)
    log = head.experiment / "logs" / "head.log"
    head.command("orchestrator", "stop").ends()
    words = ("follows job", "which runs already", "stops the job on 1 nodes", "ended")
    assert found_in_order(log.read_text(), ("all 1 supervisors have started", *words[1:])) == []


def test_log_of_launch_that_hung_before_its_job_is_kept(head: Head) -> None:
    first, address = head.cluster.addresses
    head.cluster.hang_handshake(1)
    try:
        launched = head.launch("-vv", "--no-torchrun", head.script("wait.py", PROGRAM))
        launched.wait_for_all("answers machine.probe", f"{address}: connecting")
        launched.interrupt()
        launched.ends(130)
    finally:
        head.cluster.start_sshd(1)
    text = (head.directory.parent / ".cache/orchestrator/launch.log").read_text()
    told = [f"{address}: connecting", f"{first}: its server", f"{address}: its server"]
    assert [words for words in told if words not in text] == told[2:] and head.experiments == []
