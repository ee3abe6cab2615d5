"""Tell somebody who does not look on how a job goes: by a command, a webhook or mail."""
