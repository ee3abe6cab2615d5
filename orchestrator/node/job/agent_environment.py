"""The environment of torchrun, which a standby's depends on before there is a supervisor."""

from __future__ import annotations

import os
from collections.abc import Mapping

from orchestrator.common.program import path_with
from orchestrator.protocol.spec import Spec


def agent_environment(spec: Spec, run: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's environment, which the ranks inherit, in a login with this `environ`."""
    env = {**environ, **spec.env, "ORCHESTRATOR_RUN": run}
    env["PATH"] = path_with(spec.agent[0], env.get("PATH", os.defpath))
    # torchrun starts in another directory, but `.` and `src` mean the workdir.
    if env.get("PYTHONPATH"):
        entries = env["PYTHONPATH"].split(os.pathsep)
        places = (os.path.join(spec.workdir, entry) if entry else spec.workdir for entry in entries)
        env["PYTHONPATH"] = os.pathsep.join(places)
    for name in spec.unset:
        env.pop(name, None)
    return env
