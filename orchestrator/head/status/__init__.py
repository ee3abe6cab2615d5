"""The state of jobs on their nodes, the rows of `ls`, and the comparison of experiments."""
