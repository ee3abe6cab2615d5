"""Sample what this machine does while a job runs: processors, memory, disks, networks and GPUs."""
