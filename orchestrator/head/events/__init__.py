"""What happens to a job: a type for each event, and the commands of --notify."""
