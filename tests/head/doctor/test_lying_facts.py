"""Facts of the right form that no machine has: a plan and a diagnosis, or an error in words."""

import json
import typing

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.common.errors import OrchestratorError
from orchestrator.config.launch import Launch, Where
from orchestrator.config.schema import Config
from orchestrator.head.doctor import examination
from orchestrator.head.doctor.findings import Case, Needs
from orchestrator.head.nodes import machine
from orchestrator.head.nodes.facts import Facts, ProbedNode
from orchestrator.head.nodes.node_list import parse_nodes
from orchestrator.head.plan import plan
from orchestrator.head.plan.dry_run import plan_to_json, plan_to_text
from orchestrator.head.plan.request import LaunchRequest
from orchestrator.protocol.facts import Checkup
from orchestrator.protocol.requests.machine import Probed
from orchestrator.protocol.spec import Target
from tests.head.plan.probed import facts
from tests.protocol.test_message import made, of_type

SOUND = facts("eth0 10.0.0.1/24", hostname="a", port=29500)
FIELDS = [name for name in Probed._defaults if name not in ("addresses", "target")]


def lying() -> st.SearchStrategy[Facts]:
    """A sound machine of which some parts are anything."""

    hints = typing.get_type_hints(Probed, include_extras=True)
    parts = st.lists(st.sampled_from(FIELDS), max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: of_type(hints[name]) for name in names})
    )
    return st.one_of(
        parts.map(lambda changes: SOUND.replace(**changes)),
        made(Probed).map(lambda probed: Facts(**vars(probed))),
    )


@settings(
    max_examples=12,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(lying(), st.none() | made(Checkup), st.sampled_from(["train.py", ""]))
def test_plan_and_examination_survive_any_facts(
    said: Facts, checkup: Checkup | None, name: str
) -> None:
    listed = parse_nodes("a\nb", "list")
    other = facts("eth0 10.0.0.2/24", hostname="b")
    nodes = [ProbedNode(listed[0], said, "10.0.0.1"), ProbedNode(listed[1], other, "10.0.0.2")]
    target = Target("auto" if name else "engine", name, ())
    try:
        request = LaunchRequest(Where(), Config(launch=Launch()), target, (), ())
        made_plan = plan.plan_job(request, nodes, "job", "/x")
        assert plan_to_text(made_plan) and json.dumps(plan_to_json(made_plan))
    except OrchestratorError as error:
        assert error.what
    addresses, problem = examination.find_addresses(nodes)
    answer = checkup or None
    case = Case(
        nodes=tuple(examination.examined_node(node, answer) for node in nodes),
        full=checkup is not None,
        needs=Needs(port=29500),
        addresses=addresses,
        network_error=problem,
        silent={},
    )
    assert examination.diagnosis_to_json(examination.judge_case(case, 0.0))["nodes"][0]["checks"][
        "torch"
    ]
    described = machine.describe_machine(nodes[0], checkup)
    assert machine.gpu_text(described) is not None and machine.machine_to_json(described)
    machine.network_text(described)
    machine.disk_text(described)
