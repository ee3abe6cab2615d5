"""A head attaches to a job that another version of the program started."""

import json

from orchestrator import Cluster
from tests.launching import PATIENCE, Head

WAIT = "import time; print('waiting', flush=True); time.sleep(1000)"


def test_job_of_incompatible_version_is_refused(head: Head) -> None:
    words = ["--nnodes", "1", "--no-torchrun", "--detach"]
    head.run(*words, head.script("wait.py", WAIT))
    spec = head.node_file(0, "spec.json")
    theirs = {"protocol": 99, "oldest": 98, "package": "9.0"}
    spec.write_text(json.dumps({**json.loads(spec.read_text()), "version": theirs}))
    attached = head.command("orchestrator", "attach").ends(4)
    assert "was started by orchestrator 9.0, which speaks protocol 99; this is" in attached.text
    assert "attach with orchestrator 9.0, or end the job with `orchestrator stop`" in attached.text
    assert "Traceback" not in attached.text
    assert head.left(0)
    assert head.record["state"] in ("starting", "running")
    job = Cluster(
        head.node_list, ssh_config=head.cluster.ssh_config, experiments=head.experiment.parent
    ).attach()
    assert job._head is not None and job._head.gone(PATIENCE)
    told = (job.directory / "head.txt").read_text()
    assert "orchestrator: job" in told and "was started by orchestrator 9.0" in told
    assert "Traceback" not in told
    head.command("orchestrator", "stop").ends()
    assert head.nothing_left()
