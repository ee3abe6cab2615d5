"""A real Chromium that a test drives: pages that stay connected, clicks, keys, pictures."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.clusters.require import lacking

PATIENCE = 120.0
# Resolves to the number of pixels of each color, red first, of a picture in base64.
COUNT = """(async () => {
  const bytes = Uint8Array.from(atob("PICTURE"), (letter) => letter.charCodeAt(0));
  const picture = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
  const canvas = new OffscreenCanvas(picture.width, picture.height).getContext("2d");
  canvas.drawImage(picture, 0, 0);
  const { data } = canvas.getImageData(0, 0, picture.width, picture.height), counts = {};
  for (let i = 0; i < data.length; i += 4) {
    const color = (data[i] << 16) | (data[i + 1] << 8) | data[i + 2];
    counts[color] = (counts[color] || 0) + 1;
  }
  return counts;
})()"""
# The page may navigate during a request.
NAVIGATED = "Inspected target navigated or closed"


class Browser:
    """One page. It is asked through a pipe, one JSON message after the other."""

    def __init__(self, home: Path, *options: str) -> None:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        if program is None:
            lacking("there is no Chromium: apt-get install chromium")
        theirs_in, self.out = os.pipe()
        self.into, theirs_out = os.pipe()
        words = [
            *(program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--no-first-run", "--disable-dev-shm-usage", f"--user-data-dir={home / 'profile'}"),
            *("--remote-debugging-pipe", *options),
        ]
        moved = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
        self.process = subprocess.Popen(
            ["bash", "-c", moved, "chromium", *words],
            pass_fds=(theirs_in, theirs_out),
            env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.number, self.rest, self.session = 0, b"", ""
        # These are the page's errors and warnings.
        self.console: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.out)
        os.close(self.into)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self.message(deadline)
            if answer.get("id") == self.number:
                if answer.get("error", {}).get("message") == NAVIGATED:
                    return {"result": {}}
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.into], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self.into, 1 << 20) if ready else b""
            assert data, "the browser does not answer"
            self.rest += data
        one, _, self.rest = self.rest.partition(b"\0")
        message: dict[str, Any] = json.loads(one)
        method = message.get("method")
        if method == "Log.entryAdded":
            self.console.append(str(message["params"]["entry"]))
        elif method == "Runtime.exceptionThrown":
            self.console.append(str(message["params"]["exceptionDetails"]))
        return message

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the viewport's size and the light or dark color scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self.ask("Page.navigate", url=url)

    def eval(self, script: str) -> Any:
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str) -> Any:
        """Wait until a script says something that is true, and return that."""
        deadline = time.monotonic() + PATIENCE
        guarded = f"(() => {{ try {{ return {script} }} catch {{ return null }} }})()"
        # The page may be loading.
        while not (value := self.eval(guarded)):
            assert time.monotonic() < deadline, f"{script}: not within {PATIENCE} s"
            time.sleep(0.05)
        return value

    def press(self, key: str, text: str = "") -> None:
        """Press a key: Tab, Enter, Escape, or one that types a letter."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "Space": 32}
        code = {"windowsVirtualKeyCode": codes.get(key, 0), "key": " " if key == "Space" else key}
        typed = text or {"Enter": "\r", "Space": " "}.get(key, "")
        self.ask("Input.dispatchKeyEvent", type="keyDown", text=typed, code=key, **code)
        self.ask("Input.dispatchKeyEvent", type="keyUp", code=key, **code)

    def type(self, text: str) -> None:
        self.ask("Input.insertText", text=text)

    def picture(self, path: Path) -> Path:
        shot = self.ask("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(shot))
        return path

    def colors(self, png: Path) -> Counter[bytes]:
        script = COUNT.replace("PICTURE", base64.b64encode(png.read_bytes()).decode())
        more = {"awaitPromise": True, "returnByValue": True}
        counts = self.ask("Runtime.evaluate", expression=script, **more)["result"]["value"]
        return Counter({int(color).to_bytes(3, "big"): count for color, count in counts.items()})
