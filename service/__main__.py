"""`python -m service`: the scheduler and the reconciler alone, for a scaled deployment.

The API runs beside it, as many processes as are needed, with `python -m api --no-loops`.
"""

from __future__ import annotations

import asyncio
import logging
import signal

from service.runtime import serve_loops
from service.settings import Settings


async def main() -> None:
    """Until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve_loops(Settings(), stop)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    asyncio.run(main())
