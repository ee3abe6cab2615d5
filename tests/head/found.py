"""Machines for the pure parts of the head: of a few words, complete as a probe makes them."""

from __future__ import annotations

import dataclasses
from typing import Any

from orchestrator.head.facts import Address, Facts

LOOPBACK = ("lo 127.0.0.1/8", "lo ::1/128")


def facts(*addresses: str, **fields: Any) -> Facts:
    """facts("eth0 10.0.0.1/24", port=29500): a machine with loopback and these addresses."""
    found = []
    for words in (*LOOPBACK, *addresses):
        interface, _, address = words.partition(" ")
        found.append(Address(interface, address.split("/")[0], int(address.split("/")[1])))
    machine = Facts(
        hostname="host",
        user="bob",
        python="/usr/bin/python3",
        python_version="3.11.7",
        torch="2.9.1+cu128",
        cpus=8,
        gpus=0,
        addresses=tuple(found),
        routes={},
        workdir="/job",
        workdir_exists=True,
        target_kind="script",
        target_name="train.py",
        kernel="6.1.0",
        memory_kb=1 << 20,
        omp_num_threads=None,
        library="/home/bob/.orchestrator/lib/0123",
    )
    return dataclasses.replace(machine, **fields)
