#!/usr/bin/env python3
"""Make the pictures of the docs from a real run: scripts/pictures.py [OUT]

Two SSH servers on this machine. Films of a launch, of a failure and of `demo --kill`, as SVG and
GIF; pictures of `top`, the report and the dashboard, of a job that loses a rank and goes on. Each
names its revision and the load: record on a quiet machine. Needs root, pyte, Pillow and Chromium:
the script runs in a PID namespace of its own, as all hosts of this machine see all of its
processes, and `top` shows the jobs of others as well.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from orchestrator.records.metrics import trainers  # noqa: E402
from scripts.capture import (  # noqa: E402
    Film,
    animate,
    draw,
    film,
    glimpse,
    made,
    shown_for,
)
from tests.browser import Browser  # noqa: E402
from tests.clusters.loopback import FaultyLoopback  # noqa: E402
from tests.launching import BIN, PATIENCE, Command, Head  # noqa: E402

COLUMNS, ROWS = 120, 16
FILM_COLUMNS, FILM_ROWS = 110, 20
FAILS = """
import os, torch

batch = torch.zeros(8, 64)
weights = torch.zeros(64 if os.environ["RANK"] != "3" else 63, 10)
print("step 1 loss 2.31", flush=True)
print((batch @ weights).sum())
"""
START = ROOT / "docs" / "start.md"
WIDTH, HEIGHT, FIRST_CHARTS = 1200, 910, 625
# Set in the first process of the namespace.
ALONE = "PICTURES_ALONE"
# The seconds that a picture of a GIF is shown at least.
SHORTEST = 0.2
# The rank that is killed, on the second node.
KILLED = 3
SETTINGS = {
    "model.num_layers": 2,
    "model.model_dim": 64,
    "dataset.sequence_length": 64,
    "logging.interval": 5,
    "checkpoint.steps": 40,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "docs" / "pictures")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--films", action="store_true", help="the terminals alone, without top")
    options = parser.parse_args()
    alone()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="cluster-") as name:
        directory = Path(name)
        (directory / "work").mkdir()
        with (
            FaultyLoopback(2, directory / "hosts", slots=2) as cluster,
            Browser(directory) as browser,
        ):
            head = Head(cluster, directory / "work")
            if not options.films:
                take(head, browser, options.steps, options.out)
            for film_name, make in FILMS.items():
                path = options.out / f"{film_name}.svg"
                frames = make(head, path)
                moving(browser, frames, path)


def alone() -> None:
    """Restart in a PID namespace, where only our processes are visible; a shell reaps orphans."""
    if os.environ.get(ALONE) == str(os.getppid()):
        return
    if os.geteuid() != 0:
        raise SystemExit("only root can make a PID namespace: sudo scripts/pictures.py")
    shell = ["sh", "-c", f'{ALONE}=1 "$@"; exit $?', "sh", sys.executable, *sys.argv]
    os.execvp("unshare", ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *shell])


def launch(head: Head, path: Path) -> Film:
    """Film a launch of the script in docs/start.md, from the typed command to its end."""
    (text,) = re.findall(r"```python train.py\n(.*?)```", START.read_text(), re.DOTALL)
    head.script("train.py", text.replace("epochs=5", "epochs=20"))
    words = shlex.join(["master_launch", *head.reach, "train.py"])
    return filmed(head, "master_launch train.py", words, path, "a launch on two nodes")


def failure(head: Head, path: Path) -> Film:
    """Film a launch in which one rank fails."""
    head.script("train.py", FAILS)
    words = shlex.join(["master_launch", *head.reach, "train.py"])
    return filmed(head, "master_launch train.py", words, path, "a failure, and its one cause")


def kill_film(head: Head, path: Path) -> Film:
    """Film the demo, which loses a rank and a node."""
    words = "orchestrator demo --kill"
    return filmed(head, words, words, path, "orchestrator demo --kill")


def filmed(head: Head, typed: str, words: str, path: Path, title: str) -> Film:
    shown = f"printf '\\033[1m$ {typed}\\033[0m\\r\\n'; exec {words}"
    command = ["env", "-C", str(head.directory), f"PATH={BIN}:{os.environ['PATH']}", "sh", "-c"]
    frames = film([*command, shown], FILM_COLUMNS, FILM_ROWS)
    path.write_text(animate(frames, FILM_COLUMNS, title))
    return frames


def moving(browser: Browser, frames: Film, path: Path) -> None:
    """Write the film as a GIF beside its SVG, drawn by the browser frame by frame."""
    from PIL import Image

    still, pictures, seconds, waited = path.with_suffix(".still.svg"), [], list[float](), 0.0
    for (_, lines), wait in zip(frames, shown_for(frames), strict=True):
        # Five pictures a second: a whole film of the kill would have 2 MB.
        waited += wait
        if waited < SHORTEST:
            continue
        seconds.append(waited)
        waited = 0.0
        still.write_text(draw(lines, FILM_COLUMNS, path.stem))
        browser.open(still.as_uri())
        browser.look(960, 410)
        browser.picture(still.with_suffix(".png"))
        data = io.BytesIO(still.with_suffix(".png").read_bytes())
        pictures.append(Image.open(data).convert("RGB"))
    for rest in (still, still.with_suffix(".png")):
        rest.unlink()
    # With one palette and no dithering, frames differ only where the screen does.
    palette = pictures[-1].quantize(32)
    pictures = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    pictures[0].save(
        path.with_suffix(".gif"),
        save_all=True,
        append_images=pictures[1:],
        duration=[round(1000 * each) for each in seconds],
        loop=0,
        comment=made().encode(),
    )


def take(head: Head, browser: Browser, steps: int, out: Path) -> None:
    finish(train(head, "baseline", steps // 5, "--set", "optimizer.lr=1e-3"))
    job = train(head, "gpt-small", steps, "--max-restarts", "1")
    await_step(head, 2, steps // 5)
    kill(head, KILLED)
    dashboard = head_command(head, "dashboard", "--port", "0", *head.reach)
    url = dashboard.wait_for("open (http://.*)")[1]
    terminal(head, out / "top.svg", step=steps // 4)
    site = url.partition("/?")[0]
    # The address has the token that all pages need.
    browser.open(url)
    browser.until("document.documentElement.dataset.rows == 2")
    picture(browser, out / "dashboard.png", HEIGHT)
    browser.open(f"{site}/experiment/{head.experiment.name}")
    browser.until("document.documentElement.dataset.drawn > 6")
    picture(browser, out / "experiment.png", FIRST_CHARTS)
    finish(job)
    dashboard.interrupt()
    finish(dashboard, 0, 130)
    page = head.experiment / "report.html"
    finish(head_command(head, "report", head.experiment.name))
    browser.open(page.as_uri())
    browser.until("document.documentElement.dataset.drawn > 6")
    picture(browser, out / "report.png", HEIGHT)


def picture(browser: Browser, path: Path, height: int) -> None:
    """Write a picture of the top of a page, no longer than the page."""
    browser.look(WIDTH, height)
    end = browser.eval("document.body.getBoundingClientRect().bottom")
    browser.look(WIDTH, min(height, round(end)))
    browser.picture(path)
    from PIL import Image, PngImagePlugin

    noted = PngImagePlugin.PngInfo()
    noted.add_text("Comment", made())
    with Image.open(path) as image:
        image.save(path, pnginfo=noted)


def train(head: Head, name: str, steps: int, *words: str) -> Command:
    settings = {**SETTINGS, "launch.name": name, "training.max_steps": steps}
    pairs = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return head.launch(*pairs, *words)


def head_command(head: Head, *words: str) -> Command:
    return Command([str(BIN / "orchestrator"), *words], head.directory, {})


def finish(command: Command, *good: int) -> None:
    code = command.finish()
    if code not in (good or (0,)):
        raise SystemExit(f"exit code {code}:\n{command.text}")


def terminal(head: Head, path: Path, step: int) -> None:
    """Draw `orchestrator top` in a terminal, as soon as it shows that the job is past a step."""
    words = ["env", "-C", str(head.directory), str(BIN / "orchestrator"), "top", *head.reach]

    def past(text: str) -> bool:
        return any(int(found) > step for found in re.findall(r" (\d+) of \d+ ", text))

    path.write_text(draw(glimpse(words, COLUMNS, ROWS, past, "q"), COLUMNS, "orchestrator top"))


def await_step(head: Head, count: int, step: int) -> None:
    """Wait until the newest of so many experiments has written a line of this step."""
    deadline = time.monotonic() + PATIENCE
    while len(head.experiments) < count or reached(head.experiment) < step:
        if time.monotonic() > deadline:
            raise SystemExit(f"no step {step} within {PATIENCE:.0f} s")
        time.sleep(0.1)


def reached(experiment: Path) -> int:
    return trainers.read_last_values(experiment / "outputs" / trainers.file_name(0)).step or 0


def kill(head: Head, rank: int) -> None:
    """Kill a rank as the kernel does when memory runs out."""
    (node,) = (node for node in head.record["nodes"] if str(rank) in node["ranks"])
    os.kill(node["ranks"][str(rank)]["pid"], signal.SIGKILL)


FILMS = {"launch": launch, "failure": failure, "kill": kill_film}

if __name__ == "__main__":
    main()
