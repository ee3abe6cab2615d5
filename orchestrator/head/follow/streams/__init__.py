"""Receive each node's log and events while a job runs, and find the steps in its lines."""
