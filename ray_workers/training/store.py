"""The rendezvous store of one attempt, in a process of its own so that it outlives any rank."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


def new_store() -> TCPStore:
    """Serve a store from this process, on a free port."""
    from torch._C._distributed_c10d import TCPStore

    # Not on libuv: it changes what it watches by way of io_uring, and can lose a socket that takes
    # the number of one that was just closed. Seen as a request that was never read, after ranks
    # had been killed.
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False, use_libuv=False)


def serve() -> int:
    """Serve a store, print its port, and stay until killed."""
    store = new_store()
    sys.stdout.write(f"{store.port}\n")
    sys.stdout.flush()
    while True:
        signal.pause()
