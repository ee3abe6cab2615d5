"""Sample what the GPUs do, every few seconds: by one nvidia-smi that goes on, and amdgpu's files.

An nvidia-smi for every sample would start, load NVML and close it again each time (0.1 s of a core
on a machine with 8 GPUs, and much more where no daemon keeps the driver loaded); one with `-l` says
a block of lines whenever it is time. It writes to a terminal of its own, as it would keep what it
says in a pipe back until there are 4 KB of it. rocm-smi is a Python program of half a second; the
driver's own files say the same.
"""

from __future__ import annotations

import contextlib
import math
import os
import pty
import re
import shutil
import signal
import subprocess
import time
import tty
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.node.job.ranks.agent_start import PR_SET_PDEATHSIG, prctl
from orchestrator.node.machine.checkup import CLEAN
from orchestrator.node.machine.gpus import amd, nvidia

# Name in a sample -> nvidia-smi's field, and what one of its units is.
NVIDIA = {
    "use": ("utilization.gpu", 0.01),
    "memory_bytes": ("memory.used", 1 << 20),
    "memory_total_bytes": ("memory.total", 1 << 20),
    "celsius": ("temperature.gpu", 1),
    "watts": ("power.draw", 1),
    "watts_most": ("enforced.power.limit", 1),
    "mhz": ("clocks.sm", 1),
    "memory_mhz": ("clocks.mem", 1),
    "throttle": ("clocks_throttle_reasons.active", 1),
    "ecc_uncorrected": ("ecc.errors.uncorrected.volatile.total", 1),
    "ecc_corrected": ("ecc.errors.corrected.volatile.total", 1),
}
RENAMED = {"clocks_throttle_reasons.active": "clocks_event_reasons.active"}
FIRST = ("index", "name", "pci.bus_id")
CONSTANT = ("memory_total_bytes", "watts_most")  # said once
UNKNOWN_FIELD = re.compile(r'Field "([a-z_.]+)" is not a valid field')
SILENT = 6  # so many times the interval: an nvidia-smi that says nothing is stuck
MOST_GPUS = 64
AGAIN_SECONDS = 300.0  # until another is tried
MOST_BYTES = 1 << 16  # of one block

Columns = dict[str, list[amd.Number]]


class Nvidia:
    """One nvidia-smi that goes on; `problem` says why there are no values.

    Each GPU has the place of its index, also while another one says nothing: it is lost, or its
    line has not come yet.
    """

    def __init__(self, seconds: float, root: str = "") -> None:
        self.seconds = seconds
        self.count = len(nvidia.cards(root))
        self.fields = {name: field for name, (field, _) in NVIDIA.items()}
        self.models: list[str] = []
        self.places: list[str] = []  # on the PCI bus
        self.waited = False  # for the rest of a block
        self.process: subprocess.Popen[bytes] | None = None
        self.terminal = -1
        self.text = ""
        self.newest: dict[int, list[str]] = {}
        self.heard = time.monotonic()
        self.again = 0.0  # when another is tried; 0: at once
        self.problem = "" if shutil.which("nvidia-smi") else "nvidia-smi is not installed"
        self.here = not self.problem

    def sample(self) -> Columns:
        """Return the values of all GPUs that came since the last look; empty if none came."""
        if not self.here:
            return {}
        if self.process is None:
            if time.monotonic() >= self.again:
                self.start()
            return {}
        self.read()
        if self.process.poll() is not None:
            self.ended()
        elif time.monotonic() - self.heard > SILENT * self.seconds:
            self.problem = f"nvidia-smi says nothing for {SILENT * self.seconds:.0f} s"
            self.stop(AGAIN_SECONDS)
        self.waited = 0 < len(self.newest) < self.count and not self.waited
        if self.waited:
            return {}
        rows, self.newest = self.newest, {}
        return self.columns(rows)

    def start(self) -> None:
        names = [*FIRST, *self.fields.values()]
        command = [*nvidia.query("gpu", tuple(names)), f"--loop={max(1, math.ceil(self.seconds))}"]
        try:
            self.terminal, theirs = pty.openpty()
        except OSError as error:
            self.problem, self.here = f"no terminal for nvidia-smi: {error.strerror}", False
            return
        tty.setraw(theirs)
        os.set_blocking(self.terminal, False)
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                env={**os.environ, **CLEAN},
                cwd="/",
                start_new_session=True,
                preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509
            )
        except OSError as error:
            self.problem, self.here = f"nvidia-smi cannot be run: {error.strerror}", False
            os.close(self.terminal)
        finally:
            os.close(theirs)
        self.heard, self.text = time.monotonic(), ""

    def read(self) -> None:
        """Take whole lines; the newest line of each GPU counts."""
        with contextlib.suppress(OSError):  # nothing there now, or the other end is closed
            while True:
                data = os.read(self.terminal, MOST_BYTES)
                if not data:
                    break
                self.text += data.decode("utf-8", "replace")
        *lines, self.text = self.text[-MOST_BYTES:].split("\n")
        count = len(FIRST) + len(self.fields)
        for line in lines:
            words = [word.strip() for word in line.split(",")]
            number = nvidia.number(words[0])
            if len(words) == count and number is not None and 0 <= number < MOST_GPUS:
                self.newest[number] = words
                self.count = max(self.count, number + 1)
                self.heard, self.problem = time.monotonic(), ""
            elif match := UNKNOWN_FIELD.search(line):
                self.drop(match[1])
            elif line.strip():
                self.problem = f"nvidia-smi says: {line.strip()[:200]}"

    def drop(self, field: str) -> None:
        """Ask without a field that this driver does not know, or by its newer name."""
        name = next((name for name, known in self.fields.items() if known == field), None)
        if name is not None:
            newer = RENAMED.get(field)
            self.fields = {
                key: newer if key == name and newer else known
                for key, known in self.fields.items()
                if key != name or newer
            }
            self.again = -1.0  # at once

    def ended(self) -> None:
        assert self.process is not None
        if self.again < 0:
            self.problem = ""
            self.stop(0.0)
        else:
            self.problem = self.problem or f"nvidia-smi ended with {self.process.returncode}"
            self.stop(AGAIN_SECONDS)

    def stop(self, pause: float) -> None:
        """Kill it and its children; one that hangs in the driver is left, and none is started."""
        if self.process is None:
            return
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.problem, self.here = (
                "nvidia-smi hangs in the kernel: SIGKILL does not end it",
                False,
            )
        os.close(self.terminal)
        self.process, self.again = None, time.monotonic() + pause if pause else 0.0

    def columns(self, rows: Mapping[int, Sequence[str]]) -> Columns:
        if not rows:
            return {}
        more = [""] * (self.count - len(self.models))
        self.models, self.places = [*self.models, *more], [*self.places, *more]
        for index, row in rows.items():
            self.models[index], self.places[index] = row[1], nvidia.short_pci(row[2])
        return {
            name: [
                value(rows[index][len(FIRST) + at], NVIDIA[name][1]) if index in rows else None
                for index in range(self.count)
            ]
            for at, name in enumerate(self.fields)
        }


def value(word: str, unit: float) -> amd.Number:
    """Return a number, or a mask of bits (0x...), in our unit; None where there is none."""
    word = nvidia.value(word)
    try:
        number = int(word, 16) if word.startswith("0x") else float(word)
    except ValueError:
        return None
    scaled = round(number * unit, 2)
    return int(scaled) if scaled == int(scaled) else scaled


class Gpus:
    """All GPUs of this machine, those of NVIDIA first, each always at the same place."""

    def __init__(self, seconds: float, root: str = "") -> None:
        self.nvidia, self.amd = Nvidia(seconds, root), amd.Sampling(root)

    def sample(self) -> dict[str, Any]:
        """Return name -> a value for each GPU; empty where there is none, or nothing new."""
        first, second = self.nvidia.sample(), self.amd.sample()
        return {
            name: [
                *first.get(name, [None] * self.nvidia.count),
                *second.get(name, [None] * len(self.amd.devices)),
            ]
            for name in {**first, **second}
        }

    @property
    def models(self) -> list[str]:
        return [*self.of_nvidia(self.nvidia.models), *self.amd.models]

    @property
    def places(self) -> list[str]:
        """Return where each is on the PCI bus, as the facts have it; empty: not known yet."""
        return [*self.of_nvidia(self.nvidia.places), *self.amd.places]

    def of_nvidia(self, known: Sequence[str]) -> list[str]:
        return [*known, *[""] * (self.nvidia.count - len(known))]

    @property
    def problem(self) -> str:
        """Say why values that should be there are not."""
        return self.nvidia.problem if shutil.which("nvidia-smi") else ""

    def stop(self) -> None:
        self.nvidia.stop(0.0)
