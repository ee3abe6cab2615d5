"""A secret leaves a job by no way: no record, notice, log, command or process has it."""

from pathlib import Path

from tests.launching import Head

PROGRAM = """
import base64, json, os, sys, time, urllib.parse
api, token = os.environ["API"], os.environ["HUB_TOKEN"]
print("plain", api, token, os.environ["MY_KEY"], *sys.argv)
print("in a URL", urllib.parse.quote(api, safe=""), urllib.parse.urlencode({"k": api}))
print("in a header", base64.b64encode(f"me:{api}".encode()).decode(), api.encode().hex())
print("in JSON", json.dumps({"k": api}), repr(api))
sys.stdout.write("in two writes " + api[:9])
sys.stdout.flush()
sys.stdout.write(api[9:] + "\\n")
while os.environ["RANK"] == "0" and not os.path.exists("looked"):
    time.sleep(0.01)
try:
    raise OSError(f"401 for https://host/?key={urllib.parse.quote(api)}: {sys.argv}")
except OSError as error:
    raise RuntimeError(f"{token} did not do, nor {os.environ['MY_KEY']}") from error
"""
API = 'Api-v4lue/of+mine with="quotes" & ü'
HUB, KEY, TYPED = "hub-t0ken-123456", "k3y-passed-by-pattern", "typed-4s-an-argument"
NAMED = "h00k-named-in-a-command"


def holding(places: list[Path], secrets: dict[str, str]) -> list[str]:
    """Name each file that has one of these, in any spelling."""
    found = []
    for path in (path for place in places for path in place.rglob("*") if path.is_file()):
        data = path.read_bytes()
        found += [f"{path}: {what}" for what, text in secrets.items() if text.encode() in data]
    return found


def test_secret_is_in_no_file_or_command_line(head: Head) -> None:
    (head.directory / "f.env").write_text(f"HUB_TOKEN={HUB}\n")
    program = head.script("program.py", PROGRAM)
    given = {"API": API, "MY_KEY": KEY, "TYPED": TYPED}
    words = ["--secret", "API", "--secret", "TYPED", "--env-file", "f.env", "--env", "MY_KEY"]
    words += ["--no-torchrun", "--max-restarts", "1", "--notify", f"cat >> told; : {NAMED}"]
    command = [*words, program, f"--key={TYPED}"]
    said = []
    said.append(head.run("--dry-run", *command, **given).text)
    launch = head.launch(*command, **given)
    launch.wait_for("in JSON")
    lines = list(map(read, Path("/proc").glob("[0-9]*/cmdline")))
    (head.directory / "looked").touch()
    assert launch.finish() == 1, launch.text
    said.append(launch.text)
    for other in ("status --json", "report", "list --json", "logs"):
        shown = head.command("orchestrator", *other.split())
        shown.finish()
        said.append(shown.text)
    told = (head.directory / "told").read_text()
    ends = {"API": API[:9], "its end": API[9:20], "HUB": HUB, "KEY": KEY, "TYPED": TYPED}
    urls = {"quoted": "Api-v4lue%2Fof%2B", "in base64": "QXBpLXY0bHVl", "shifted": "FwaS12NGx1Z"}
    secrets = {**ends, **urls, "hex": API.encode().hex()}
    assert "did not do, nor (redacted)" in told and "in two writes ***" in launch.text
    assert not [what for what, text in secrets.items() if text in told]
    assert not [
        what for what, text in {**secrets, "NOTIFY": NAMED}.items() if text in "".join(said)
    ]
    nodes = [head.cluster.run_home(node) for node in (0, 1)]
    showing = holding([head.experiment, *nodes, head.directory.parent / ".cache"], secrets)
    specs = {f"{head.node_file(node, 'spec.json')}" for node in (0, 1)}
    left = [line for line in showing if line.partition(":")[0].rpartition("/")[2] != "spec.json"]
    assert not left and specs, left
    modes = {path.stat().st_mode & 0o777 for node in nodes for path in node.rglob("spec.json")}
    assert modes == {0o600}
    assert holding([head.experiment, *nodes], {"NOTIFY": NAMED}) == [
        f"{head.experiment / '.notify'}: NOTIFY"
    ]
    assert not [line for line in lines if API in line or HUB in line or KEY in line]


def test_secret_in_error_of_node_is_not_shown(head: Head) -> None:
    words = ("--secret", "PLACE", "--activate", f"conda:{NAMED}", head.script("x.py", ""))
    text = head.launch(*words, PLACE=NAMED).ends(4).text
    assert "conda:(redacted): there is no" in text and NAMED not in text


def read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""
