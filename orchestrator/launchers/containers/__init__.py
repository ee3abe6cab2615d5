"""The job in containers: Compose, Kubernetes, and their image."""
