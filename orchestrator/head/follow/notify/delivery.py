"""Bring a notice to a target. Each way has a time limit, and says in words what failed."""

from __future__ import annotations

import contextlib
import getpass
import http.client
import json
import os
import shutil
import signal
import smtplib
import subprocess
import tempfile
import threading
import urllib.error
import urllib.request
from email.message import EmailMessage
from typing import IO, Any

from orchestrator.common.version import __version__
from orchestrator.head.follow.notify.notice import Notice
from orchestrator.head.follow.notify.target import Target
from orchestrator.protocol.message import encode

SENDMAIL_PLACES = "/usr/sbin:/usr/lib:/usr/local/sbin:/opt/homebrew/sbin"


def deliver(target: Target, notice: Notice, seconds: float) -> str:
    """Tell one target; return why that failed, or nothing. It raises nothing."""
    ways = {"cmd": by_command, "webhook": by_webhook, "mail": by_mail}
    try:
        return ways[target.kind](target.to, notice, seconds)
    except subprocess.TimeoutExpired:
        return f"it was not done within {seconds:g} s"
    except TimeoutError:
        return f"no answer within {seconds:g} s"
    except OSError as error:
        return error.strerror or type(error).__name__
    except Exception as error:  # noqa: BLE001  no notice may end a job, and no text may show a URL
        return type(error).__name__


# -- cmd: -------------------------------------------------------------------------------------


def by_command(command: str, notice: Notice, seconds: float) -> str:
    """Run a shell command with the notice on its standard input."""
    variables = {
        "NOTIFY_EVENT": notice.event,
        "NOTIFY_STATE": notice.state,
        "NOTIFY_EXPERIMENT": notice.experiment,
        "NOTIFY_PATH": notice.path,
        "NOTIFY_TEXT": notice.text,
    }
    return run(["/bin/sh", "-c", command], json.dumps(encode(notice)) + "\n", seconds, variables)


def run(words: list[str], given: str, seconds: float, more: dict[str, str]) -> str:
    """Run a program in a session of its own; at the limit all of that is killed.

    It need not read what it is given, and of what it prints to standard error the last is kept.
    """
    with tempfile.TemporaryFile() as typed:
        typed.write(given.encode("utf-8", "replace"))
        typed.seek(0)
        process = subprocess.Popen(
            words,
            stdin=typed,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **more},
            start_new_session=True,  # Ctrl-C for the job is not meant for it
        )
    said = LastWords(process.stderr)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return f"exit code {code}{said.line()}" if code else ""


class LastWords(threading.Thread):
    """Reads what a program prints as fast as it comes, and keeps the end of it."""

    def __init__(self, pipe: IO[bytes] | None) -> None:
        super().__init__(daemon=True, name="notify")
        assert pipe is not None
        self.pipe = pipe
        self.end = b""
        self.start()

    def run(self) -> None:
        with self.pipe:
            while data := os.read(self.pipe.fileno(), 1 << 16):
                self.end = (self.end + data)[-2000:]

    def line(self) -> str:
        self.join(1.0)  # what it left running may hold the pipe for longer
        lines = self.end.decode("utf-8", "replace").splitlines()
        return f": {lines[-1]}" if lines else ""


# -- webhook: ---------------------------------------------------------------------------------


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses to take the notice to an address that the user did not name."""

    def redirect_request(self, *_: Any) -> None:
        return None


def by_webhook(url: str, notice: Notice, seconds: float) -> str:
    """Post the notice as JSON."""
    body = json.dumps(notice.to_message()).encode()
    headers = {"Content-Type": "application/json", "User-Agent": f"orchestrator/{__version__}"}
    request = urllib.request.Request(url, body, headers, method="POST")
    try:
        with urllib.request.build_opener(NoRedirect).open(request, timeout=seconds):
            return ""
    except urllib.error.HTTPError as error:
        error.close()
        moved = ", that it is elsewhere: give that address" if 300 <= error.code < 400 else ""
        return f"the server answered {error.code}{moved}"
    except urllib.error.URLError as error:
        if isinstance(error.reason, OSError):
            raise error.reason from None
        return "the server was not reached"
    except (http.client.HTTPException, ValueError) as error:
        return f"the server did not answer as one of HTTP ({type(error).__name__})"


# -- mail: ------------------------------------------------------------------------------------


def by_mail(address: str, notice: Notice, seconds: float) -> str:
    """Hand a mail to this machine's sendmail, or to its SMTP server where it has none."""
    message = mail(address, notice)
    program = shutil.which("sendmail") or shutil.which("sendmail", path=SENDMAIL_PLACES)
    if program is not None:
        return run([program, "-i", "--", address], message.as_string(), seconds, {})
    return by_smtp(message, seconds)


def by_smtp(message: EmailMessage, seconds: float, host: str = "localhost", port: int = 25) -> str:
    try:
        with smtplib.SMTP(host, port, timeout=seconds) as server:
            server.send_message(message)
    except smtplib.SMTPException as error:
        return f"the mail server of this machine refused it ({type(error).__name__})"
    except ConnectionRefusedError:
        return "this machine has neither sendmail nor a mail server"
    return ""


def mail(address: str, notice: Notice) -> EmailMessage:
    message = EmailMessage()
    message["To"] = address
    message["From"] = f"{getpass.getuser()}@{os.uname().nodename}"
    message["Subject"] = f"[orchestrator] {notice.title}"[:200]
    message.set_content(notice.text + "\n", cte="8bit" if notice.text.isascii() else "base64")
    return message
