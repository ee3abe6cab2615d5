"""A real Slurm on this machine: munged, slurmctld and two slurmd of our own, in one directory.

Children in the foreground, on ports of their own, with a key of their own: nothing of the system's
Slurm or munge is touched, and nothing is left. Needs neither root nor systemd.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.clusters.require import lacking
from tests.free_ports import free_ports

PACKAGES = "apt-get install slurm-wlm munge"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
PATH = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
PATIENCE = 20.0
CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=8
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool_%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd_%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=3
UnkillableStepTimeout=20
MinJobAge=300
SchedulerParameters=sched_interval=1,sched_min_interval=1,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8
PartitionName=main Nodes=ALL Default=YES MaxTime=60 DefaultTime=10 State=UP
"""


def require_slurm() -> None:
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        lacking(f"{', '.join(missing)} not installed: {PACKAGES}")


class Slurm:
    """`with Slurm(directory) as slurm:` two nodes, n1 and n2, both of them this machine."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.user = getpass.getuser()
        self.conf = directory / "slurm.conf"
        self.env = {"SLURM_CONF": str(self.conf), "PATH": PATH}

    def __enter__(self) -> Slurm:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self.directory.chmod(0o755)
        (self.directory / "state").mkdir()
        key = self.directory / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        host = socket.gethostname().partition(".")[0]
        words: dict[str, Any] = {"host": host, "ports": free_ports(3), "user": self.user}
        self.conf.write_text(CONF.format(directory=self.directory, **words))
        files = [
            f"--{name}-file={self.directory}/munge.{name}" for name in ("key", "pid", "log", "seed")
        ]
        sock = self.directory / "munge.socket"
        self.daemon("munged", "--foreground", f"--socket={sock}", *files)
        self.wait_for(sock.exists, "munged")
        self.daemon("slurmctld", "-D")
        for node in ("n1", "n2"):
            self.daemon("slurmd", "-D", "-N", node)
        self.wait_for(lambda: self.said("sinfo", "-h", "-t", "idle", "-o", "%D") == "2", "slurmd")

    def daemon(self, name: str, *words: str) -> None:
        program = shutil.which(name, path=PATH)
        assert program is not None
        label = f"{name}{words[-1] if name == 'slurmd' else ''}"
        with (self.directory / f"{label}.log").open("wb") as log:
            self.daemons[label] = subprocess.Popen(
                [program, *words],
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_for(self, ready: Any, what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not ready():
            ended = [label for label, one in self.daemons.items() if one.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = {
                    path.name: path.read_text()[-1500:] for path in self.directory.glob("*.log")
                }
                raise AssertionError(f"{what} did not come up (ended: {ended}): {logs}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Jobs first: their processes are the slurmds' to end."""
        if "slurmdn2" in self.daemons:
            self.run("scancel", "--user", self.user)
            self.run("scancel", "--user", self.user, "--signal=KILL", "--full")
            deadline = time.monotonic() + PATIENCE
            while self.said("squeue", "-h") and time.monotonic() < deadline:
                time.sleep(0.1)
        for label in reversed(list(self.daemons)):
            one = self.daemons.pop(label)
            one.send_signal(signal.SIGTERM)
            try:
                one.wait(5)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()
        for pid in with_variable(f"SLURM_CONF={self.directory}/"):
            with contextlib.suppress(ProcessLookupError):
                # This is a slurmstepd whose slurmd is gone.
                os.kill(pid, signal.SIGKILL)

    # -- what a user types --------------------------------------------------------------------

    def run(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, **self.env, **options.pop("env", {})}
        return subprocess.run(
            words, env=env, capture_output=True, text=True, check=False, timeout=60, **options
        )

    def said(self, *words: str, **options: Any) -> str:
        return self.run(*words, **options).stdout.strip()

    def queue(self) -> str:
        return self.said("squeue", "-h", "-o", "%i %T")

    def controller_log(self) -> str:
        return (self.directory / "slurmctld.log").read_text()[-3000:]


def with_variable(text: str) -> list[int]:
    """Return the processes that have a variable in their environment that begins with this text."""
    wanted = text.encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes():
                found.append(int(path.parent.name))
    return [pid for pid in found if pid != os.getpid()]
