"""Write a Chrome trace per rank over some steps of the run, and a summary of what overlapped.

config.profiling says when. outputs/profile then holds rank_RR.json.gz (for chrome://tracing or
ui.perfetto.dev) and summary.json.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from orchestrator import files
from orchestrator.config.schema import Profiling
from orchestrator.engine.observe import overlap
from orchestrator.engine.ranks.ranks import Ranks, host_group
from orchestrator.errors import UsageError


class Profile:
    """Call `step()` after every training step; without profiling it costs nothing."""

    def __init__(
        self, profiling: Profiling, outputs: Path | None, ranks: Ranks, say: Callable[[str], None]
    ) -> None:
        self._profiling, self._ranks, self._say = profiling, ranks, say
        # Started by hand, without an experiment: use the current directory.
        self._directory = (outputs or Path()) / "profile"
        self._left = profiling.steps_before + profiling.active
        self._profiler: Any = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Profile:
        if self._profiling.enabled:
            from torch.profiler import ProfilerActivity, profile, schedule

            wanted = self._profiling
            activities = [ProfilerActivity.CPU]
            if self._ranks.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(
                activities=activities,
                schedule=schedule(
                    wait=wanted.wait or 0,
                    warmup=wanted.warmup or 0,
                    active=wanted.active,
                    repeat=1,
                ),
                record_shapes=wanted.record_shapes,
                profile_memory=wanted.profile_memory,
                with_stack=wanted.with_stack,
            )
            self._open.enter_context(self._profiler)
        return self

    def step(self) -> None:
        if self._profiler is None:
            return
        self._profiler.step()  # after the last one this stops the recording
        self._left -= 1
        if not self._left:
            self._share(self._write())
            self._profiler = None
            self._open.close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._profiler is not None and kind is None:
            self._say(f"the run ended {self._left} steps before its profile was complete: no trace")
        # After an error the other ranks may be anywhere: nothing is shared.
        self._open.close()

    def _write(self) -> overlap.Rank | str:
        """Write this rank's trace, or return why it cannot be written. Never raises: the training
        goes on, and the other ranks wait for the answer."""
        name = f"rank_{self._ranks.rank:02d}.json"
        plain, packed = self._directory / f".{name}", self._directory / f".{name}.gz"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            # The profiler does not say when the disk is full; the file it leaves cannot be read.
            self._profiler.export_chrome_trace(str(plain))
            events, _ = overlap.read(plain)
            # A trace of 124 MB became 15 MB in 0.4 s; the default level, 9, 12 MB in 6.6 s.
            with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=1) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            packed.replace(self._directory / f"{name}.gz")
            return overlap.of_rank(events)
        except (OSError, UsageError, RuntimeError) as error:
            self._warn(f"no trace of rank {self._ranks.rank}: {error}")
            return str(error)
        finally:
            with contextlib.suppress(OSError):
                for rest in self._directory.glob(f".{name}*"):  # the profiler's .tmp among them
                    rest.unlink()

    def _share(self, own: overlap.Rank | str) -> None:
        """Gather all ranks' results on rank 0, which writes and prints the summary."""
        results: list[overlap.Rank | str | None] = [own]
        if self._ranks.world > 1:
            first = self._ranks.rank == 0
            results = [None] * self._ranks.world
            dist.gather_object(own, results if first else None, dst=0, group=host_group())
            if not first:
                return
        ranks = {n: rank for n, rank in enumerate(results) if isinstance(rank, overlap.Rank)}
        if not ranks:
            return
        together = overlap.compare(ranks)
        try:
            summary = json.dumps(overlap.as_data(together), indent=1) + "\n"
            files.replace(self._directory / "summary.json", summary)
        except OSError as error:
            self._warn(f"no summary of the profile: {error}")
        before, active = self._profiling.steps_before, self._profiling.active
        which = f"its steps {before + 1} to {before + active}" if before else "its first steps"
        self._say(f"profile of {active} steps of this run, {which}, in {self._directory}")
        self._say(overlap.to_text(together))
        if len(ranks) < self._ranks.world:
            missing = [str(n) for n, rank in enumerate(results) if n not in ranks]
            self._say(f"it lacks the ranks that could not write a trace: {', '.join(missing)}")

    def _warn(self, text: str) -> None:
        sys.stderr.write(f"WARNING: {text}\n")
        sys.stderr.flush()
