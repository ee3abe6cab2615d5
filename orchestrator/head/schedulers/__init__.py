"""Backends of jobs (SSH, Slurm, run-node) and Slurm's commands."""
