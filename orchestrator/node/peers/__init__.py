"""The supervisors of one job among themselves: heartbeats and leases."""
