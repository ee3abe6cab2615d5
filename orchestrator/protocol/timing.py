"""How long one machine or process waits for another, in seconds, by who waits for whom.

The pauses and limits of one loop alone stand in its own module.
"""

from __future__ import annotations

import signal

# -- a head waits for a node's answer --
# From memory: the holders of GPUs, a port, the end of a part.
QUICK_ANSWER_SECONDS = 15.0
# One that needs a driver, a tool or the disk. A busy node must not count as lost.
ANSWER_SECONDS = 30.0
# The doctor's, whose commands have a minute each (node/machine/checkup.py).
EXAMINE_ANSWER_SECONDS = 90.0
# That of the user's hook, which has a minute (node/start/requests.py).
HOOK_ANSWER_SECONDS = 70.0
# For reading or writing a piece of a file.
FILE_ANSWER_SECONDS = 60.0
# For listing, checking out or removing many files on a slow disk.
FILES_ANSWER_SECONDS = 600.0
# For reading terabytes, or building an environment.
WORK_ANSWER_SECONDS = 3600.0

# -- a head waits for a job on its nodes --
# At least this long for all nodes to start their parts.
START_PATIENCE_SECONDS = 30.0
# Beyond the grace, for a stop: SIGKILL, the sweep, and a second look at the processes.
STOP_PROOF_SECONDS = 20.0
# Beyond the grace, for a node that has to confirm that it has ended.
END_LIMIT_SECONDS = 30.0
# For any node, before it leaves a job without an end.
CUT_OFF_SECONDS = 600.0
# Before a node is ended for a failure elsewhere, for one that it reports of its own.
HEARSAY_SECONDS = 0.3
# For nodes that an earlier attempt lost, if the job has too few.
RETURN_SECONDS = 3.0
# For a node that answered a moment ago, before a spare replaces it.
SPARED_SECONDS = 3.0
# For lost nodes, at the end of a job.
LOST_SECONDS = 5.0
# For a node's answer to a sample, before the others are shown without it.
SAMPLE_SECONDS = 1.0
# For a node to end a command of exec: from SIGTERM to SIGKILL, and in all.
EXEC_GRACE_SECONDS = 5
EXEC_END_SECONDS = EXEC_GRACE_SECONDS + 5.0
# For an acknowledgement from a node that runs a command of exec.
EXEC_SILENCE_SECONDS = 30.0

# -- a head waits for the head before it, an onlooker for either --
# To fetch the outputs, to leave and to release its lock.
HEAD_LEAVES_SECONDS = 20.0
# To fetch the rest of the logs.
CATCH_UP_SECONDS = 60.0
# The interval of questions to a scheduler's controller, which answers many users.
SCHEDULER_SECONDS = 5.0
# For Slurm's controller, which may be busy; its commands retry by themselves.
SLURM_SECONDS = 30.0
# For Slurm to end a job: one that it requeues, and beyond the grace (scancel takes KillWait).
REQUEUE_SECONDS = 60.0
KILL_LIMIT_SECONDS = 60.0
# For a file of another machine on a shared disk: of a batch job's head, and of another rank.
FILE_SEEN_SECONDS = 10.0
SEEN_WITHIN_SECONDS = 3.0

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
GROWTH_SECONDS = 2.0

# -- a node waits for its heads and for the other nodes --
# It ends its part if no head follows the job this long after its start.
UNFOLLOWED_SECONDS = 60.0
# The interval of the heartbeats among supervisors, and the fewest of them in a lease.
PEER_BEAT = 1.0
BEATS_IN_A_LEASE = 10
# A shorter lease would end jobs on a busy processor.
SHORTEST_LEASE = 1.0
# A living supervisor whose connection was closed has reconnected after this time.
GONE_SECONDS = 5.0
# A caller that has not shown by then who it is does not belong to the job.
STRANGER_SECONDS = 5.0
# For a connection to another node, which a check tries.
DIAL_SECONDS = 3.0
# For a connection to another supervisor, which a firewall may block.
PEER_DIAL_SECONDS = 10.0
# For the supervisors that end later, to hear of the end of this one.
GOODBYE_SECONDS = 0.3
# For another launch that is about to start, or to give up; the second, where it came first.
CLAIM_SECONDS = 5.0
RIVALS_SECONDS = 2.0
# A node refuses a start this long before its head gives up.
TOLD_SECONDS = 10.0
# For a head to repeat its request for a profile.
PROFILE_SECONDS = 30.0

# -- processes of one node wait for each other --
# For its ranks to write their stacks, and for those that do not fail when another rank has waited
# for them in vain.
STACKS_SECONDS = 3.0
LATE_STACKS_SECONDS = 1.0
# For the last word of a supervisor that is stopped, and the driver to free a process's memory.
LAST_WORD_SECONDS = 2.0
RELEASE_SECONDS = 2.0
# For another rank, in `orchestrator verify`, beyond its own time.
VERIFY_SECONDS = 60.0
# For one to die of SIGKILL. One that survives longer hangs in the kernel.
DEATH_SECONDS = 10.0
# For a standby, which may still import modules, and for the order to it.
STANDBY_SECONDS = 12.0
# On this signal, a rank writes its stacks; it is rarely used otherwise. macOS lacks such signals.
STACKS_SIGNAL = getattr(signal, "SIGRTMIN", 34) + 9
