"""Heartbeats and leases among the supervisors of one job."""
