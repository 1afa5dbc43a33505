"""Run torchft's lighthouse on a given port, until terminated.

It uses the settings of torchft's README, except for the heartbeat timeout, which is 1 s instead of
5 s, because the survivor of a killed replica waits for it.
"""

from __future__ import annotations

import signal
import sys

from torchft.coordination import LighthouseServer


def main(port: int) -> None:
    server = LighthouseServer(
        bind=f"[::]:{port}",
        min_replicas=1,
        join_timeout_ms=10_000,
        quorum_tick_ms=100,
        heartbeat_timeout_ms=1_000,
    )
    print(server.address(), flush=True)
    signal.sigwait([signal.SIGTERM])
    server.shutdown()


if __name__ == "__main__":
    # Before the server's threads start, so that none of them receives the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    main(int(sys.argv[1]))
