"""The numbers of jobs for other programs: trackers, and Prometheus."""
