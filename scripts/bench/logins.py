"""Measure commands over connections that the user's ssh holds (ControlPersist), and with logins.

    python scripts/bench/logins.py

`exec -- true`, and a launch of `true` until its end. All in turns, on the same hosts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from ground import (
    Cluster,
    Contender,
    Word,
    as_data,
    compete,
    machine,
    our,
    require_root,
    run,
    seconds,
    show,
    table,
)

EXEC, LAUNCH = "exec -- true", "a launch of true"
LOGIN, OPEN = "with a login", "ControlPersist"
FIVE_LINES = "Host *\n    ControlMaster auto\n    ControlPath {}/%C\n    ControlPersist 10m\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 8, 32])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    require_root()
    results = {}
    # A short path, as the names of sockets have at most 107 bytes.
    with tempfile.TemporaryDirectory() as sockets:
        for hosts in options.hosts:
            results[str(hosts)] = [
                Contender(f"{what}, {how}", partial(timed, Path(sockets), what, how))
                for what in (EXEC, LAUNCH)
                for how in (LOGIN, OPEN)
            ]
            compete(results[str(hosts)], hosts, options.repeat, f"{hosts} hosts")
    title = f"Logins without waiting (median of {options.repeat})"
    show(options.json, title, machine(), render(results), as_data(results))


def timed(sockets: Path, what: str, how: str, cluster: Cluster) -> Mapping[str, float]:
    config = cluster.directory / "with_masters"
    config.write_text(FIVE_LINES.format(sockets) + cluster.ssh_config.read_text())
    words: list[Word] = ["--nodes", cluster.node_list]
    if how == OPEN:
        words += ["--ssh-config", config]
        # The user opens these connections once.
        for address in cluster.addresses:
            run(cluster, ["ssh", "-F", config, address, "true"], silent=True)
    command = [*our("orchestrator"), "exec", *words, "--", "true"]
    if what == LAUNCH:
        command = [*our("master_launch"), *words, "--no-torchrun", "--sync", "off", "true"]
    started = time.perf_counter()
    ran = run(cluster, command)
    sample = {"seconds": time.perf_counter() - started, "processor": ran.processor}
    if how == OPEN:
        for address in cluster.addresses:
            run(cluster, ["ssh", "-F", config, "-O", "exit", address], silent=True)
    return sample


def render(results: Mapping[str, Sequence[Contender]]) -> str:
    head = [""]
    for hosts in results:
        head += [f"{hosts} hosts", "processor"]
    rows = []
    for index, one in enumerate(next(iter(results.values()))):
        row = [one.name]
        for everyone in results.values():
            row += [seconds(everyone[index].median(name)) for name in ("seconds", "processor")]
        rows.append(row)
    return table(head, rows)


if __name__ == "__main__":
    main()
