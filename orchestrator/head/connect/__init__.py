"""Transports (SSH, srun, this machine), host keys, one channel per node, all nodes at once."""
