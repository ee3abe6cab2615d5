"""Run on a node beside the processes of a job, for as long as the job does."""
