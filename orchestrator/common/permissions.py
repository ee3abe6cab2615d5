"""Says who besides us may change a file, by the rules that sshd has for key files (StrictModes).

Goes to the nodes before node/install.py, as part of the program that unpacks the rest there: the
standard library only, and text that any Python 3 can parse.
"""

import grp
import os
import pwd
import stat


def other_writers(status: os.stat_result) -> str:
    """Return who besides us and root may write this, as the end of a sentence, or "".

    A group of the owner's name and without other members may: Debian's OpenSSH permits that as
    well, because a group for each user and umask 002 are usual there.
    """
    if status.st_uid not in (0, os.geteuid()):
        return "belongs to %s" % user_name(status.st_uid)
    if stat.S_ISLNK(status.st_mode):
        # The mode of a link means nothing; its target is checked by itself.
        return ""
    if status.st_mode & stat.S_IWOTH:
        return "may be written by everybody"
    if status.st_mode & stat.S_IWGRP and not is_private_group(status.st_gid, status.st_uid):
        return "may be written by %s" % group_name(status.st_gid)
    return ""


def may_rename(status: os.stat_result) -> str:
    """Return who besides us and root may replace our entries in a directory, or ""."""
    if status.st_mode & stat.S_ISVTX and status.st_uid in (0, os.geteuid()):
        # In a sticky directory such as /tmp, users rename and remove only their own entries.
        return ""
    return other_writers(status)


def loose_levels(*paths: str) -> "list[tuple[str, str]]":
    """Return (directory, reason) for each of these paths that other users could change.

    Links are followed: a directory with little room is one to another disk.
    """
    levels = {os.path.dirname(paths[0]): may_rename}
    for path in paths:
        if os.path.lexists(path):
            levels.setdefault(os.path.dirname(os.path.realpath(path)), may_rename)
            levels[os.path.realpath(path)] = other_writers
    problems = [(path, judge(os.stat(path))) for path, judge in levels.items()]
    return [(path, problem) for path, problem in problems if problem]


def is_private_group(gid: int, owner: int) -> bool:
    """Return True for the group that is named like its owner, and has no other member but root."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(owner)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name, "root"}


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return "user %d" % uid


def group_name(gid: int) -> str:
    try:
        return "group %s" % grp.getgrgid(gid).gr_name
    except KeyError:
        return "group %d" % gid
