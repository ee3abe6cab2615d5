"""Seconds that two ends must agree on. Each is here once, for the head and for the nodes."""

from __future__ import annotations

import signal

# -- a start --
START_PATIENCE_SECONDS = 30.0  # a head waits at least so long for all nodes to start their parts;
UNFOLLOWED_SECONDS = 60.0  # a node ends its part if no head follows the job so long after that

# -- the head waits for a node's answer --
# The node answers from memory: who holds its GPUs, a port, the end of a part.
QUICK_ANSWER_SECONDS = 15.0
# It asks a driver or a tool, or looks at its disk. A node that is very busy is not lost.
ANSWER_SECONDS = 30.0
# It runs the user's hook, which has a minute (node/start/requests.py).
HOOK_ANSWER_SECONDS = 70.0
# It reads or writes a piece of a file.
FILE_ANSWER_SECONDS = 60.0
# It lists, checks out or removes many files on a slow disk.
FILES_ANSWER_SECONDS = 600.0
# It reads terabytes, or builds an environment.
WORK_ANSWER_SECONDS = 3600.0

# -- the channel between head and node --
SERVER_BEAT = 1.0  # the node's server says something so often,
HEAD_PATIENCE_SECONDS = 8.0  # and is lost to the head after so long without a word
HEAD_BEAT_SECONDS = 10.0  # the head asks for the time so often,
SERVER_PATIENCE = 60.0  # and the server leaves a head that is silent for so long
LOOK_SECONDS = 2.0  # between two questions of the head's what has grown on a node

# -- the end of a job --
HEARSAY_SECONDS = 0.3  # what fails by itself in this time says so, before it is ended for another
SWEEP_PATIENCE_SECONDS = 10.0  # processes without a supervisor have this long to die of SIGKILL

# -- supervisors among themselves --
PEER_BEAT = 1.0
BEATS_IN_A_LEASE = 10  # at least
GONE_SECONDS = 5.0  # whose line was closed, and who lives, has called again within so long
SHORTEST_LEASE = 1.0  # a shorter one would end jobs for a busy processor

# -- a rank and the server of its node --
# A rank writes its stacks; no program that we know of uses it. A Mac has no such signals.
STACKS_SIGNAL = getattr(signal, "SIGRTMIN", 34) + 9
