"""Take what comes from each node while a job runs: its log, its events, the steps in its lines."""
