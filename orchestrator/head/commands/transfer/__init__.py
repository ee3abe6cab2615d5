"""`orchestrator pull` and `push`: files between this machine and all nodes."""
