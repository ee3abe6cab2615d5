"""Write a Chrome trace per rank for some steps, as configured or on request.

config.profiling chooses the steps; each rank writes outputs/profile/rank_RR.json.gz, for
chrome://tracing or ui.perfetto.dev. Traces that a head requests while the training runs are in
outputs/profile/step_NNNNNNNN. The head analyses them.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.common import files
from orchestrator.common.text import Say
from orchestrator.config.schema import ProfilingConfig
from orchestrator.engine.ranks.ranks import Ranks, gather_values
from orchestrator.protocol.message import Nonsense, decode_value, encode_value, parse_object
from orchestrator.protocol.requests import follow as asked
from orchestrator.protocol.requests.follow import ProfileAnswer, ProfileRequest
from orchestrator.protocol.timing import PROFILE_SECONDS


@dataclass(frozen=True)
class Recording:
    """The steps to trace on every rank, even on a rank whose profiler could not start."""

    wanted: ProfilingConfig
    directory: Path
    # The number of the first step in the trace.
    first: int
    # True if a head requested it.
    asked: bool = False

    @property
    def last(self) -> int:
        return self.first + self.wanted.active - 1


class Profile:
    """Traces steps; call `step()` after every training step. It is free while nothing is traced."""

    def __init__(
        self,
        profiling: ProfilingConfig,
        outputs: Path | None,
        ranks: Ranks,
        say: Say,
        *,
        marks: Callable[[bool], None] = lambda _: None,
        before: int = 0,
    ) -> None:
        """Create it with `marks`, which switches marking the phases in a trace on and off.

        `before` is the number of steps that earlier runs have made.
        """
        self._profiling, self._ranks, self._say = profiling, ranks, say
        self._marks, self._before = marks, before
        # Without an experiment (torchrun by hand) traces go to the current directory.
        self._directory = (outputs or Path()) / "profile"
        self._recording: Recording | None = None
        self._left = 0
        self._profiler: Any = None
        self._problem = ""
        self._open = contextlib.ExitStack()
        self.requests = ProfileRequests(ranks)

    def __enter__(self) -> Profile:
        wanted = self._profiling
        if wanted.enabled:
            first = self._before + wanted.steps_before + 1
            self._start(Recording(wanted, self._directory, first))
        return self

    # -- requests while the training runs ---------------------------------------------------------

    def wanted(self) -> int:
        """Return the number of steps that a head requests; 0 if none does, or on other ranks."""
        return 0 if self._recording is not None else self.requests.take()

    def begin(self, steps: int, after: int) -> None:
        """Start to trace `steps` steps; the first after step `after` is only warm-up.

        Every rank calls it with the same arguments.
        """
        # Another head's request may have arrived while the first was on its way.
        if self._recording is not None:
            return
        wanted = ProfilingConfig(
            enabled=True, wait=0, warmup=1, active=min(steps, asked.MOST_STEPS)
        )
        first = after + 1 + wanted.steps_before
        recording = Recording(wanted, self._directory / f"step_{first:08d}", first, asked=True)
        self.requests.notify(asked.TRACING, (first, recording.last))
        self._say(f"a head asks for a profile: steps {first} to {recording.last} are traced")
        self._start(recording)

    def _start(self, recording: Recording) -> None:
        from torch.profiler import ProfilerActivity, profile, schedule

        wanted = recording.wanted
        self._recording, self._left = recording, wanted.steps_before + wanted.active
        self._problem = ""
        activities = [ProfilerActivity.CPU]
        if self._ranks.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(
            activities=activities,
            schedule=schedule(
                wait=wanted.wait or 0, warmup=wanted.warmup or 0, active=wanted.active, repeat=1
            ),
            record_shapes=wanted.record_shapes,
            profile_memory=wanted.profile_memory,
            with_stack=wanted.with_stack,
        )
        try:
            self._open.enter_context(profiler)
        except RuntimeError as error:
            # The program's own profiler is active.
            if not recording.asked:
                raise
            self._problem = str(error).strip().partition("\n")[0]
            return
        self._profiler = profiler
        self._marks(True)

    def step(self) -> None:
        recording = self._recording
        if recording is None:
            return
        if self._profiler is not None:
            # The profiler only accepts metadata while it records.
            if self._left == 1:
                node, host = self._ranks.nodes[self._ranks.rank]
                about = {
                    "rank": self._ranks.rank,
                    "node": node,
                    "host": host,
                    "world": self._ranks.world,
                    "first": recording.first,
                    "last": recording.last,
                }
                self._profiler.add_metadata_json("orchestrator", json.dumps(about))
            # After the last step this ends the recording.
            self._profiler.step()
        self._left -= 1
        if not self._left:
            problem = self._write(recording) if self._profiler is not None else self._problem
            self._close()
            self._answer(recording, gather_values(problem))

    def _close(self) -> None:
        self._recording = self._profiler = None
        self._marks(False)
        self._open.close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._recording is not None and kind is None:
            self._say(f"the run ended {self._left} steps before its profile was complete: no trace")
        if self.requests.request is not None:
            reason = "failed" if kind is not None else "ended"
            self.requests.notify(
                asked.FAILED, text=f"the training {reason} before its profile was whole"
            )
        # After an error the other ranks may be anywhere, so no collective is called here.
        self._close()

    # -- the trace files --------------------------------------------------------------------------

    def _write(self, recording: Recording) -> str:
        """Write this rank's trace; return an empty text, or the error that prevented it.

        It does not raise, because the training continues and other ranks wait for the answer.
        """
        directory, name = recording.directory, f"rank_{self._ranks.rank:02d}.json"
        plain, packed = directory / f".{name}.part", directory / f".{name}.gz.part"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(plain))
            # Level 1 compressed 124 MB to 15 MB in 0.4 s; the default, 9, to 12 MB in 6.6 s.
            with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=1) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            packed.replace(directory / f"{name}.gz")
            return ""
        except (OSError, RuntimeError) as error:
            sys.stderr.write(f"WARNING: no trace of rank {self._ranks.rank}: {error}\n")
            return str(error)
        finally:
            with contextlib.suppress(OSError):
                # This includes the .tmp file of the profiler.
                for rest in directory.glob(f".{name}*"):
                    rest.unlink()

    def _answer(self, recording: Recording, problems: list[str]) -> None:
        """Print the traces' directory, or the errors, and report it to the head that asked."""
        without = [f"rank {n}: {problem}" for n, problem in enumerate(problems) if problem]
        lacking = "; ".join(without[:4])
        steps = (recording.first, recording.last)
        if len(without) == len(problems):
            words = f"no rank could write a trace: {lacking}"
            self._say(words)
            self.requests.notify(asked.FAILED, steps, text=words)
            return
        lacks = f"; it lacks {lacking}" if lacking else ""
        self._say(
            f"profile of steps {steps[0]} to {steps[1]} in {recording.directory}{lacks};"
            " `orchestrator profile` reads it"
        )
        directory = recording.directory.relative_to(self._directory.parent)
        self.requests.notify(asked.WRITTEN, steps, str(directory), lacking)


# -- requests of a head ----------------------------------------------------------------------------


class ProfileRequests:
    """Reads profile requests of heads from the run directory, one at a time, on rank 0."""

    def __init__(self, ranks: Ranks) -> None:
        run = os.environ.get("ORCHESTRATOR_RUN") if ranks.rank == 0 else None
        self.run = Path(run) if run else None
        self.path = Path(run or "", asked.REQUEST_FILE)
        self.request: ProfileRequest | None = None

    def take(self) -> int:
        """Read and remove a new request; return its number of steps, or 0 if there is none."""
        if self.run is None or not self.path.exists():
            return 0
        try:
            with files.open_plain(self.path) as file:
                request = decode_value(ProfileRequest, parse_object(file.read(1 << 12)), newer=True)
            if time.time() - self.path.stat().st_mtime < PROFILE_SECONDS:
                self.request = request
                # The node accepts no other request while the file or this answer is there.
                self.notify(asked.ASKED)
        except (OSError, Nonsense):
            request = None
        with contextlib.suppress(OSError):
            self.path.unlink()
        if request is None or self.request is not request:
            return 0
        return min(max(1, request.steps), asked.MOST_STEPS)

    def notify(
        self, state: str, steps: tuple[int, int] = (0, 0), directory: str = "", text: str = ""
    ) -> None:
        """Write an answer to the latest request."""
        if self.run is None or self.request is None:
            return
        first, last = steps
        reply = ProfileAnswer(
            id=self.request.id, state=state, first=first, last=last, directory=directory, text=text
        )
        with contextlib.suppress(OSError):
            files.replace_file(self.run / asked.ANSWER_FILE, json.dumps(encode_value(reply)))
        if state in (asked.WRITTEN, asked.FAILED):
            self.request = None
