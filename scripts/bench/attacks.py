"""Attack launches in ways that no test has the time for: is each answered rightly, and in words?

    python scripts/bench/attacks.py [NAME...] [--launches 100] [--lines 250000] [--burners 8]

Prints a row for each attack, and exits with 1 if one was not answered rightly: a stack trace, a
hang, a wrong exit code, a byte that is lost, a process that is left. Needs root, as the hosts are
network namespaces. Without a NAME all attacks are made, about an hour on two busy cores.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from http.cookiejar import CookieJar
from pathlib import Path
from typing import NamedTuple

from ground import Cluster, machine, require_root, table

from orchestrator.head.screen.log_reader import LogFile, LogReader
from tests.head.environments.test_requirements import wheel
from tests.launching import BIN, Command, Head

# Seconds for one command, on cores that are busy with other work.
LIMIT = 240.0
TRACE = "Traceback (most recent call last)"
SOON = ("--connect-timeout", "6", "--node-loss-timeout", "8")


class Answer(NamedTuple):
    """The result of an attack."""

    right: bool
    what: str


class Ground(NamedTuple):
    """Where an attack is made, and how much of it."""

    directory: Path
    launches: int
    lines: int
    burners: int

    @contextlib.contextmanager
    def head(self, size: int, **options: object) -> Iterator[Head]:
        """Create hosts and a head in an empty directory; remove them afterwards."""
        work = self.directory / "work"
        work.mkdir()
        with Cluster(size, self.directory / "hosts", **options) as cluster:  # type: ignore[arg-type]
            someone = Head(cluster, work)
            yield someone
            someone.end_background()


def said_badly(command: Command) -> bool:
    return TRACE in command.text


def last_words(command: Command) -> str:
    return command.lines[-1].removeprefix("orchestrator: ")[:90] if command.lines else "nothing"


# -- many ---------------------------------------------------------------------------------------

MANY = """
import json, os, sys, tempfile, threading
from pathlib import Path
from orchestrator import Cluster

def state():
    pages = int(open("/proc/self/statm").read().split()[1])
    children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    files = len([*Path(tempfile.gettempdir()).rglob("*")])
    counts = [threading.active_count(), len(os.listdir("/proc/self/fd")), len(children), files]
    return [*counts, pages >> 8]

nodes, config, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
cluster = Cluster(nodes, ssh_config=config, no_torchrun=True)
for number in range(count):
    cluster.launch("hello.py").wait()
    if number in (count // 5, count - 1):
        print(json.dumps(state()), flush=True)
"""


def launches_in_one_process(ground: Ground) -> Answer:
    """Threads, descriptors, children, files and memory do not grow with one program's launches."""
    with ground.head(1) as head:
        head.script("hello.py", "print('hello')\n")
        script = head.script("many.py", MANY)
        count = str(ground.launches)
        files = [str(head.node_list), str(head.cluster.ssh_config)]
        (temporary := ground.directory / "temporary").mkdir()
        environment = {"TMPDIR": str(temporary)}
        command = Command([sys.executable, script, *files, count], head.directory, environment)
        code = command.finish(30.0 * ground.launches)
        states = [json.loads(line) for line in command.lines if line.startswith("[")]
        if code or len(states) < 2:
            return Answer(False, f"exit code {code}: {last_words(command)}")
        early, late = states
        grew = late[4] - early[4]
        what = f"{count}: threads {early[0]}, {late[0]}; descriptors {early[1]}, {late[1]};"
        what += f" children {early[2]}, {late[2]}; temporary files {early[3]}, {late[3]};"
        what += f" {grew} MiB more"
        return Answer(early[:4] == late[:4] and grew <= 8 and head.nothing_left(), what)


SUM = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
mark = torch.tensor([int(sys.argv[1])])
dist.all_reduce(mark)
print("sum", mark.item(), flush=True)
"""


def launches_at_once(ground: Ground) -> Answer:
    """Ten jobs at once on the same nodes each have their own ports, directories and figures."""
    with ground.head(2) as head:
        script = head.script("sum.py", SUM)
        commands = [head.launch("--nproc", "1", script, str(10**n)) for n in range(10)]
        codes = [command.finish(3 * LIMIT) for command in commands]
        wrong = [
            n
            for n, command in enumerate(commands)
            if [line.split("| ")[-1] for line in command.lines if "| sum" in line]
            != [f"sum {2 * 10**n}"] * 2
        ]
        names = {path.name for path in head.experiments}
        left = not head.nothing_left()
        what = f"exit codes {sorted(set(codes))}, {len(names)} experiments, {len(wrong)} wrong sums"
        return Answer(not any(codes) and not wrong and len(names) == 10 and not left, what)


# -- floods -------------------------------------------------------------------------------------

FLOOD = """
import hashlib, os, sys
rank, count, place = os.environ["RANK"], int(sys.argv[1]), sys.argv[2]
digest = hashlib.sha256()
for number in range(count):
    line = f"rank {rank} line {number} " + "x" * (number % 97) + "\\n"
    digest.update(line.encode())
    sys.stdout.write(line)
with open(f"{place}/sum_{rank}", "w") as file:
    file.write(digest.hexdigest())
"""


@contextlib.contextmanager
def burning(count: int) -> Iterator[None]:
    """Keep the cores busy with processes that only compute."""
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(count)]
    try:
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


def floods_under_load(ground: Ground) -> Answer:
    """Every byte of four ranks that print as fast as they can is in the logs, once."""
    with ground.head(2) as head, burning(ground.burners):
        script = head.script("flood.py", FLOOD)
        began = time.monotonic()
        words = ("--nproc", "2", script, str(ground.lines), str(head.directory))
        command = head.launch(*words)
        code = command.finish(10 * LIMIT)
        took = time.monotonic() - began
        logs = head.experiment / "logs"
        digests: dict[str, hashlib._Hash] = {}
        for node in (0, 1):
            (text,) = logs.glob(f"node_{node}_*.txt")
            log = LogFile(node, str(node), text, text.with_suffix(".ranks"))
            reader = LogReader(log)
            while pieces := list(reader.read(1 << 20)):
                for stream, data in pieces:
                    digests.setdefault(stream, hashlib.sha256()).update(data)
        same = [
            digests[str(rank)].hexdigest() == (head.directory / f"sum_{rank}").read_text()
            for rank in range(4)
            if str(rank) in digests
        ]
        shown = len(command.lines) >= 4 * ground.lines
        what = f"exit code {code}, {4 * ground.lines} lines in {took:.0f} s, logs same {same}"
        what += f", {'all' if shown else 'not all'} on the screen"
        return Answer(not code and same == [True] * 4 and shown, what)


# -- cuts ---------------------------------------------------------------------------------------

WORK = """
import time
print("begin", flush=True)
time.sleep(6)
print("end", flush=True)
"""
MOMENTS: dict[str, str | float] = {
    **{f"{after} s after the start": after for after in (0.2, 0.6, 1.0, 1.5, 2.0, 3.0, 4.5)},
    "code has come": r"orchestrator: code .* on",
    "logs are named": r"logs in",
    "all has begun": r"rank1 \| begin",
    "a stop was asked for": r"asking all ranks",
    "a rank has ended": r"\| end",
}


def cuts_of_a_launch(ground: Ground) -> Answer:
    """A link that is cut in any phase ends the launch in time, with a message and nothing left."""
    wrong, codes = [], []
    with ground.head(2) as head:
        script = head.script("work.py", WORK)
        for name, moment in MOMENTS.items():
            code, what = one_cut(head, script, moment)
            codes.append(code)
            print(f"    {name}: {code}, {what or 'right'}", flush=True)
            wrong += [f"{name}: {what}"] if what else []
    return Answer(not wrong, "; ".join(wrong) or f"{len(codes)} moments, exit codes {codes}")


def one_cut(head: Head, script: str, moment: str | float) -> tuple[int, str]:
    """Cut the link of a node at a moment; return the exit code, and what is wrong."""
    before = len(head.experiments)
    command = head.launch("--sync", "always", "--nproc", "1", *SOON, script)
    if isinstance(moment, float):
        time.sleep(moment)
    elif moment == "asking all ranks":
        command.wait_for(r"rank1 \| begin", LIMIT)
        command.interrupt()
    if isinstance(moment, str):
        command.wait_for(moment, LIMIT)
    assert isinstance(head.cluster, Cluster)
    head.cluster.cut(1)
    try:
        began = time.monotonic()
        code = command.finish(LIMIT)
        took = time.monotonic() - began
    except AssertionError:
        return -1, f"it did not end in {LIMIT:.0f} s"
    finally:
        head.cluster.restore(1)
    new = head.experiments[before:]
    verdict = command.text[-2000:]
    states = [json.loads((path / "job.json").read_text())["state"] for path in new]
    problems = [
        *(["a stack trace"] if said_badly(command) else []),
        *([f"exit code {code}"] if code not in (0, 4, 130) else []),
        *(["it names no node"] if code == 4 and head.cluster.addresses[1] not in verdict else []),
        *([f"the record says {states}"] if {"running", "starting"} & set(states) else []),
        *([f"{took:.0f} s"] if took > 120 else []),
        *(["processes are left"] if not head.nothing_left(60.0) else []),
    ]
    return code, ", ".join(problems)


# -- disks --------------------------------------------------------------------------------------

TALK = """
import time
for number in range(60):
    print(f"line {number} " + "x" * 100_000, flush=True)
    time.sleep(0.1)
print("end", flush=True)
"""
FULL = r"[Nn]o space left|is full|no room|disk"


def disk_full_at_the_head(ground: Ground) -> Answer:
    """A full disk under the experiments is reported; once it has room, all data arrives."""
    with ground.head(1) as head:
        script = head.script("talk.py", TALK)
        (head.directory / "experiments").mkdir()
        small = 'mount -t tmpfs -o size=3m small experiments && exec "$@"'
        words = ["unshare", "--mount", "bash", "-c", small, "bash", str(BIN / "master_launch")]
        words += ["--nodes", str(head.node_list), "--ssh-config", str(head.cluster.ssh_config)]
        command = Command([*words, "--check", "none", "--nproc", "1", script], head.directory, {})
        named = command.wait_for(FULL, LIMIT).string
        place = f"/proc/{command.process.pid}/root{head.directory}/experiments"
        more = ["mount", "-o", "remount,size=64m", str(head.directory / "experiments")]
        subprocess.run(["nsenter", "-t", str(command.process.pid), "-m", *more], check=True)
        command.wait_for(r"\| end", LIMIT)
        (log,) = Path(place).glob("*/logs/node_0_*.txt")
        whole = said_by(TALK) in log.read_text()
        code = command.finish(LIMIT)
        left = not head.nothing_left()
        what = f"exit code {code}, log whole {whole}, left {left}: {named[14:90]}"
        return Answer(not code and whole and not left and not said_badly(command), what)


def said_by(program: str) -> str:
    """Return what a program prints."""
    quick = program.replace("time.sleep", "abs")
    return subprocess.check_output([sys.executable, "-c", quick], text=True)


def disk_full_on_a_node(ground: Ground) -> Answer:
    """A full disk of a node is reported, and nothing is left on it."""
    home = Path.home()
    with ground.head(2, tmpfs=[home], tmpfs_size="256m") as head:
        script = head.script("talk.py", TALK)
        command = head.launch("--check", "none", "--nproc", "1", *SOON, script)
        command.wait_for(r"rank1 \| line 3 ", LIMIT)
        assert isinstance(head.cluster, Cluster)
        head.cluster.fill_disk(1, home)
        code = command.finish(LIMIT)
        named = re.search(FULL, command.text) is not None
        left = not head.nothing_left()
        what = f"exit code {code}, named {named}, left {left}: {last_words(command)}"
        return Answer(named and not left and not said_badly(command) and code in (0, 1, 4), what)


# -- networks -----------------------------------------------------------------------------------


def few_startups(ground: Ground) -> Answer:
    """An sshd that drops logins when a few are under way is asked again."""
    with ground.head(2) as head:
        for node in (0, 1):
            config = head.cluster.node(node) / "sshd_config"
            rest = re.sub(r"(?m)^MaxStartups.*\n", "", config.read_text())
            config.write_text(f"MaxStartups 2:30:4\n{rest}")
            head.cluster.end_sshd(node)
            head.cluster.spawn_sshd(node)
        commands = [head.command("orchestrator", "exec", "--", "true") for _ in range(12)]
        codes = [command.finish(LIMIT) for command in commands]
        bad = sum(map(said_badly, commands))
        words = next((last_words(c) for c, code in zip(commands, codes, strict=True) if code), "")
        what = f"{codes.count(0)} of {len(codes)} commands went through, {bad} stack traces {words}"
        return Answer(codes.count(0) == len(codes) and not bad, what)


def nodes_of_ipv6_alone(ground: Ground) -> Answer:
    """Hosts without IPv4, named by a range, train; the dashboard shows it on ::1."""
    with ground.head(2, ipv6=True) as head:
        lines = [
            f"Host {name}\n    HostName {address}\n    HostKeyAlias {address}\n"
            for name, address in zip(("host0", "host1"), head.cluster.addresses, strict=True)
        ]
        config = head.cluster.ssh_config
        config.write_text("".join(lines) + config.read_text())
        head.node_list.write_text("host[0-1]\n")
        command = head.launch("--nproc", "1", head.script("sum.py", SUM), "7")
        code = command.finish(LIMIT)
        sums = sum("| sum 14" in line for line in command.lines)
        board = Command(
            [str(BIN / "orchestrator"), "dashboard", "--host", "::1", "--port", "0"],
            head.directory,
            {},
        )
        url = board.wait_for(r"open (http://\S+)", LIMIT)[1]
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        with opener.open(url, timeout=60) as page:
            status = page.status
        with opener.open(f"{url.partition('?')[0]}api/experiments", timeout=60) as page:
            there = head.experiment.name in page.read().decode()
        board.interrupt()
        board.finish(LIMIT)
        what = f"exit code {code}, {sums} sums, {url.split('?')[0]} {status}, named there: {there}"
        return Answer(not code and sums == 2 and status == 200 and there, what)


# -- memory -------------------------------------------------------------------------------------

RESUME = """
import os, signal, time
from pathlib import Path
place, attempt = Path(os.environ["ORCHESTRATOR_RESUME_DIR"]), os.environ["ORCHESTRATOR_ATTEMPT"]
found = (place / "state").read_text() if (place / "state").exists() else "nothing"
print("attempt", attempt, "in", place, "found", found, flush=True)
if attempt == "1":
    (place / "state").write_text("mine")
    time.sleep(3)
    os.kill(os.getpid(), signal.SIGKILL)
"""
PLANTED = {
    "another's directory": "mkdir -m 777 NAME && chown 65534 NAME",
    "a link": "mkdir -m 777 /tmp/elsewhere && ln -s /tmp/elsewhere NAME",
    "a file": "touch NAME",
    "open to all": "mkdir -m 777 NAME",
}


def memory_of_others(ground: Ground) -> Answer:
    """Files of other users in /dev/shm are not used; a restart finds its own state."""
    name = f"/dev/shm/orchestrator-{os.getuid()}"
    wrong = []
    with ground.head(1, tmpfs=["/tmp"]) as head:
        script = head.script("resume.py", RESUME)
        for title, how in PLANTED.items():
            head.cluster.exec(0, ["sh", "-c", f"rm -rf {name} /tmp/elsewhere"])
            head.cluster.exec(0, ["sh", "-c", how.replace("NAME", name)])
            command = head.launch("--nproc", "1", "--max-restarts", "1", script)
            code = command.finish(2 * LIMIT)
            lines = [line for line in command.lines if "| attempt" in line]
            own = len(lines) == 2 and lines[1].endswith("found mine")
            planted = any(f" in {name}/" in line for line in lines)
            told = name in command.text
            if code or not own or planted or not told:
                wrong.append(f"{title}: exit code {code}, own {own}, used {planted}, told {told}")
    return Answer(not wrong, "; ".join(wrong) or f"{len(PLANTED)} kinds of things in the way")


# -- packages -----------------------------------------------------------------------------------

SECRET = "s3cretOfAnIndex77"


class Index(http.server.BaseHTTPRequestHandler):
    """An index of one package, `mine`, that may hang or send half; its URL needs a password."""

    wheel = b""
    name = "mine-1.0-py3-none-any.whl"
    hangs = False
    # The part of the wheel that is sent.
    share = 1.0

    def do_GET(self) -> None:
        if self.hangs:
            time.sleep(LIMIT)
        whole, body = f"/simple/mine/{self.name}", b""
        if SECRET not in base64.b64decode(self.headers.get("Authorization", "")[6:]).decode():
            self.send_error(401)
            return
        if self.path == whole:
            body = self.wheel
        elif self.path.startswith("/simple/mine"):
            body = f'<a href="{whole}">{self.name}</a>'.encode()
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if self.path != whole else "application/zip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: int(len(body) * (self.share if self.path == whole else 1))])

    def log_message(self, *_: object) -> None:
        pass


HOSTILE = """[global]
index-url = {index}
target = /var/tmp/hostile
prefix = /var/tmp/hostile
user = true
require-virtualenv = true
no-binary = :all:
find-links =
    /nowhere
    {links}
[download]
dest = /var/tmp/hostile
"""


@contextlib.contextmanager
def index_of(how: dict[str, object]) -> Iterator[str]:
    """Serve a package index with a password until the block ends; `how` sets its answers."""
    kind = type("AnIndex", (Index,), how)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://me:{SECRET}@127.0.0.1:{server.server_port}/simple"
    finally:
        server.shutdown()
        # In a thread, as a hanging response must not delay the end.
        threading.Thread(target=server.server_close, daemon=True).start()


def packages_of_enemies(ground: Ground) -> Answer:
    """A bootstrap from an index that hangs, lies or needs a password fails clearly or succeeds."""
    wrong, codes = [], {}
    with ground.head(1) as head:
        links = head.directory / "links"
        links.mkdir()
        wheel(links, "mine", "1.0")
        (whole,) = (path.read_bytes() for path in links.iterdir())
        config = head.directory / "pip.conf"
        cases: dict[str, tuple[dict[str, object], dict[str, str], int, str]] = {
            "with a password": ({}, {}, 0, "1 package"),
            "half a wheel": ({"share": 0.5}, {}, 3, "."),
            "not a wheel": ({"wheel": b"x" * 5000}, {}, 3, "."),
            "a source": ({"name": "mine-1.0.tar.gz"}, {}, 3, "wheel"),
            "hangs": (
                {"hangs": True},
                {"PIP_DEFAULT_TIMEOUT": "5", "PIP_RETRIES": "0"},
                3,
                "reach|time",
            ),
            "a hostile pip.conf": ({}, {"PIP_CONFIG_FILE": str(config)}, 0, "1 package"),
        }
        for title, (how, more, expected, words) in cases.items():
            cache = head.directory / f"cache of {title}"
            with index_of({"wheel": whole, **how}) as url:
                config.write_text(HOSTILE.format(index=url, links=links))
                settings = {"PIP_INDEX_URL": url, "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}
                if "PIP_CONFIG_FILE" in more:
                    settings.pop("PIP_INDEX_URL")
                settings |= {"XDG_CACHE_HOME": str(cache), **more}
                command = head.command("orchestrator", "bootstrap", "mine==1.0", **settings)
                seen = watch_for(SECRET, command)
                code = command.finish(LIMIT)
            codes[title] = code
            problems = [
                *([f"exit code {code}"] if code != expected else []),
                *(["a stack trace"] if said_badly(command) else []),
                *(["its password is shown"] if SECRET in command.text else []),
                *([f"its password is on the command line of {seen[0]}"] if seen else []),
                *(["it does not say why"] if not re.search(words, command.text) else []),
                *(["it is written elsewhere"] if Path("/var/tmp/hostile").exists() else []),
            ]
            if problems:
                print(command.text[-1500:], file=sys.stderr)
            wrong += [f"{title}: {', '.join(problems)}"] if problems else []
            shutil.rmtree(head.cluster.run_home(0) / "environments", ignore_errors=True)
    return Answer(not wrong, "; ".join(wrong) or f"exit codes {codes}")


def watch_for(secret: str, command: Command) -> list[str]:
    """Record the programs below a command whose command line has a secret, while it runs."""
    seen: list[str] = []

    def watch() -> None:
        while command.process.poll() is None:
            for place in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    line = place.read_bytes()
                    if secret.encode() in line:
                        seen.append(line.split(b"\0")[0].decode(errors="replace"))
            time.sleep(0.01)

    threading.Thread(target=watch, daemon=True).start()
    return seen


# -- all ----------------------------------------------------------------------------------------

ATTACKS: dict[str, Callable[[Ground], Answer]] = {
    attack.__name__: attack
    for attack in (
        *(launches_in_one_process, launches_at_once, floods_under_load, cuts_of_a_launch),
        *(disk_full_at_the_head, disk_full_on_a_node, few_startups, nodes_of_ipv6_alone),
        *(memory_of_others, packages_of_enemies),
    )
}


def made(name: str, options: argparse.Namespace) -> Answer:
    """Run one attack on hosts of its own; an exception counts as a wrong answer."""
    place = Path(tempfile.mkdtemp(prefix="attack-", dir="/var/tmp"))
    ground = Ground(place, options.launches, options.lines, options.burners)
    try:
        return ATTACKS[name](ground)
    except (AssertionError, OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
        print(traceback.format_exc()[-2000:], file=sys.stderr)
        return Answer(False, f"{type(error).__name__}: {str(error)[-200:]}")
    finally:
        shutil.rmtree(place, ignore_errors=True)


def rows_of(names: Sequence[str], options: argparse.Namespace) -> Iterator[tuple[str, Answer]]:
    for name in names:
        began = time.monotonic()
        answer = made(name, options)
        mark = "right" if answer.right else "WRONG"
        print(f"{mark} {name} ({time.monotonic() - began:.0f} s): {answer.what}", flush=True)
        yield name, answer


def main() -> None:
    parser = argparse.ArgumentParser(description="Attack launches; is each answered rightly?")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ATTACKS))
    parser.add_argument("--launches", type=int, default=100)
    parser.add_argument("--lines", type=int, default=250_000, help="of each of four ranks")
    parser.add_argument("--burners", type=int, default=8, help="processes beside the flood")
    options = parser.parse_args()
    if unknown := set(options.names) - set(ATTACKS):
        parser.error(f"no such attack: {', '.join(sorted(unknown))}")
    require_root()
    with tempfile.TemporaryDirectory(prefix="attacks-home-") as home:
        # The state of a head is kept apart from that of the user who runs this.
        os.environ["ORCHESTRATOR_HOME"] = home
        os.environ["OMP_NUM_THREADS"] = "1"
        answers = dict(rows_of(options.names or list(ATTACKS), options))
    rows = [[name, "right" if a.right else "WRONG", a.what] for name, a in answers.items()]
    print(f"\n{machine()}\n\n{table(['attack', 'answer', 'what came of it'], rows)}")
    sys.exit(not all(answer.right for answer in answers.values()))


if __name__ == "__main__":
    main()
