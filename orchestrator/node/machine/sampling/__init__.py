"""Samples this machine while a job runs: counters, disks, GPUs, and what is wrong with it."""
