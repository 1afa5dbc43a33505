"""The process between the forkserver and a rank: the rank's parent, like a container's init.

If a script sends a signal to its parent, or to its parent's process group, the signal reaches this
process and does not end other ranks. Orphaned processes of the rank become children of this process
instead of the forkserver. The init process reports to the forkserver the rank's pid and how the
rank ended. The init process lives until all processes that the rank started have exited.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any, NoReturn

from ray_workers.node.forkserver import forked_child
from ray_workers.shared.processes.linux import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl
from ray_workers.shared.processes.procfs import carry_mark


def run(
    request: dict[str, Any], fds: Sequence[int], mark: str, forkserver: int, reports: int
) -> NoReturn:
    """Fork the rank and manage it, in a process that was just forked from the forkserver.

    reports: a pipe for lines to the forkserver: `pid N` and `exit CODE` (negative: the signal).
    """
    try:
        carry_mark(mark)
        os.setsid()
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != forkserver:
            os._exit(1)  # the forkserver died before this process was set to die with it
        signal.set_wakeup_fd(-1)
        own = os.getpid()
        rank = os.fork()
        if rank == 0:
            forked_child.run(request, fds, own)
        os.write(reports, b"pid %d\n" % rank)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(reports, 0)  # nothing else stays open: a rank's pipe must close when the rank ends
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        _reap(rank, 0)
    finally:
        os._exit(1)


def _reap(rank: int, reports: int) -> NoReturn:
    """Wait for descendant processes until none are left."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            os._exit(0)
        assert ended is not None
        if ended.si_pid == rank:
            # Report the exit before another process can reuse the pid.
            exited = ended.si_code == os.CLD_EXITED
            os.write(reports, b"exit %d\n" % (ended.si_status if exited else -ended.si_status))
        os.waitpid(ended.si_pid, 0)
