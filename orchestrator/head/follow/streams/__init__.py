"""What comes from each node while a job runs: its log, its events, and the steps its lines tell."""
