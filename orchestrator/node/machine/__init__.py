"""Describes and samples this machine: processors, memory, disks, networks, GPUs, software."""
