"""Start a job and its further attempts: find nodes, send the code, plan, check, start."""
