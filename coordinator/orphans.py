"""The children that a subreaper was given and has not started: what its descendants leave, compilers of a killed worker
say. As they end they stay zombies until they are reaped, and nobody waits for them.
"""

import contextlib
import os
from collections.abc import Collection
from pathlib import Path


def reap_orphans(kept: Collection[int]) -> list[int]:
    """Reap those that have ended, of Linux's /proc; their ids. Whoever waits for a process itself is not disturbed:
    `kept` are left alone, and all that could have been started here, for that is in this process's session or leads
    one of its own. (An orphan that leads one stays until this process ends.)"""
    try:
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return []
    except ChildProcessError:
        return []
    own, own_session = os.getpid(), os.getsid(0)
    reaped = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # it has been reaped meanwhile
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            state, (parent, _, session) = fields[0], map(int, fields[1:4])
            is_orphan = parent == own and session not in (own_session, pid) and pid not in kept
            if state == "Z" and is_orphan and os.waitpid(pid, os.WNOHANG)[0] == pid:
                reaped.append(pid)
    return reaped
