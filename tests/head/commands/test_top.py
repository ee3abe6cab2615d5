"""Display of the live view for each of its keys."""

from orchestrator.views.top.command import users_stack

OURS = '  File "/home/a/lib/c2/orchestrator/node/job/ranks/rank.py", line 411 in run_python'
BELOW = '  File "/usr/lib/python3/torch/distributed/run.py", line 982 in run_script_path'


def test_users_stack_hides_frames_of_launcher() -> None:
    """Some thirty frames of ours and torchrun's had stood below the two that matter."""
    tree = "/home/ada/.orchestrator/code/snapshots/0123abcd-42/home/ada/my work"
    stacks = f"""Thread 0x00007f01 (most recent call first):
{OURS.replace("run_python", "tell_collectives")}

Thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3/queue.py", line 171 in get

Current thread 0x00007f03 (most recent call first):
  File "{tree}/data.py", line 88 in read
  File "{tree}/train.py", line 3 in <module>
{OURS}
{BELOW}
"""
    assert users_stack(stacks, "/home/ada/my work") == [
        "Current thread 0x00007f03 (most recent call first):",
        '  File "/home/ada/my work/data.py", line 88 in read',
        '  File "/home/ada/my work/train.py", line 3 in <module>',
        "",
        "Thread 0x00007f02 (most recent call first):",
        '  File "/usr/lib/python3/queue.py", line 171 in get',
    ]
