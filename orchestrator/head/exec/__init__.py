"""Run a command on all nodes of the list, or open a shell on one."""
