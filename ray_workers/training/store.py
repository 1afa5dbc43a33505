"""The rendezvous store of one attempt, in a process of its own so that it outlives any rank."""

from __future__ import annotations

import os
import signal
import sys


def serve() -> int:
    """Serve a TCPStore on a free port, print the port, and stay until killed."""
    from torch._C._distributed_c10d import TCPStore

    # The store's libuv may watch its sockets through io_uring, and lose one that is opened where
    # another was just closed: seen as a request that was never read, after ranks were killed.
    os.environ["UV_USE_IO_URING"] = "0"
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    sys.stdout.write(f"{store.port}\n")
    sys.stdout.flush()
    while True:
        signal.pause()
