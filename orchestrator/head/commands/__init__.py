"""The work of each command, once its options are parsed."""
