"""The screen in a thread of its own: a paused terminal or a slow pipe never delays the run."""

from __future__ import annotations

import queue
import threading

from orchestrator.head.screen.screen import Screen


class Display(threading.Thread):
    def __init__(self, screen: Screen) -> None:
        super().__init__(daemon=True, name="display")
        self.screen = screen
        self.messages: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.news = threading.Event()
        self.muted = threading.Event()

    def say(self, text: str) -> None:
        self.messages.put(text)
        self.news.set()

    def grew(self) -> None:
        self.news.set()

    def mute(self) -> None:
        """Show no more of the logs: what follows a failure only echoes it, and is in the files."""
        self.muted.set()

    def finish(self) -> None:
        """Show what is left, then end."""
        self.messages.put(None)
        self.news.set()
        self.join()

    def run(self) -> None:
        last = False
        while not last:
            self.news.wait()
            self.news.clear()
            last = self._speak()
            while not self.muted.is_set() and self.screen.pump():
                last = self._speak() or last
        self.screen.close()

    def _speak(self) -> bool:
        while True:
            try:
                text = self.messages.get_nowait()
            except queue.Empty:
                return False
            if text is None:
                return True
            self.screen.say(text)
