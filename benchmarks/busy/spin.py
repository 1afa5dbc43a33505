"""A rank that is always busy once a file exists: `spin.py SECONDS FILE`."""

import sys
import time
from pathlib import Path

print("waits", flush=True)
while not Path(sys.argv[2]).exists():
    time.sleep(0.2)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    pass
