"""torchft's lighthouse, on a port that is given, until it is ended.

With the settings of torchft's README, but for the heartbeat, which is missed after 1 s and not 5:
the survivor of a killed replica waits for that.
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
    # Before the server's threads begin, so that none of them takes it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    main(int(sys.argv[1]))
