"""One machine's part of a job, started by hand on each machine."""
