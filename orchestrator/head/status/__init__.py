"""Ask the nodes what runs where, and fetch logs that this head does not have yet."""
