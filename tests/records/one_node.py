"""The record of a node of which a test needs no more than that there is one."""

from orchestrator.records.experiment import NodeRecord

NODE = NodeRecord(
    index=0,
    name="a",
    host="a",
    user=None,
    port=None,
    address="a",
    python="p",
    first_rank=0,
    nproc=1,
)
