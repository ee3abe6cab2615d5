"""Time limits in seconds that two ends must agree on, for the head and for the nodes."""

from __future__ import annotations

import signal

# -- a start --
# A head waits at least this long for all nodes to start their parts.
START_PATIENCE_SECONDS = 30.0
# A node ends its part if no head follows the job this long after that.
UNFOLLOWED_SECONDS = 60.0

# -- timeouts of the head for a node's answer --
# For answers from memory: the holders of GPUs, a port, the end of a part.
QUICK_ANSWER_SECONDS = 15.0
# For answers that need a driver, a tool or the disk. A busy node must not count as lost.
ANSWER_SECONDS = 30.0
# For the user's hook, which has a minute (node/start/requests.py).
HOOK_ANSWER_SECONDS = 70.0
# For reading or writing a piece of a file.
FILE_ANSWER_SECONDS = 60.0
# For listing, checking out or removing many files on a slow disk.
FILES_ANSWER_SECONDS = 600.0
# For reading terabytes, or building an environment.
WORK_ANSWER_SECONDS = 3600.0

# -- the channel between head and node --
# The interval of the server's heartbeats.
SERVER_BEAT = 1.0
# The head considers a server lost after this time without data.
HEAD_PATIENCE_SECONDS = 8.0
# The interval at which the head requests the time.
HEAD_BEAT_SECONDS = 10.0
# The server exits if the head is silent for this long.
SERVER_PATIENCE = 60.0
# The interval at which the head asks for the growth of a node's files.
LOOK_SECONDS = 2.0

# -- the end of a job --
# Before a node is ended for a failure elsewhere, it has this long to report one of its own.
HEARSAY_SECONDS = 0.3
# Processes without a supervisor have this long to die of SIGKILL.
SWEEP_PATIENCE_SECONDS = 10.0

# -- supervisors among themselves --
PEER_BEAT = 1.0
# The minimum number of heartbeats in a lease.
BEATS_IN_A_LEASE = 10
# A living supervisor whose connection was closed has reconnected after this time.
GONE_SECONDS = 5.0
# A shorter lease would end jobs on a busy processor.
SHORTEST_LEASE = 1.0

# -- a rank and the server of its node --
# On this signal, a rank writes its stacks; it is rarely used otherwise. macOS lacks such signals.
STACKS_SIGNAL = getattr(signal, "SIGRTMIN", 34) + 9
