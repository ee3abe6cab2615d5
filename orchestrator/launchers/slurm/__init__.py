"""Nodes from a Slurm allocation; a job as a batch file."""
