"""The metrics of jobs for other programs: trackers and Prometheus."""
