"""The live view: all nodes with their users, and the progress of each job."""
