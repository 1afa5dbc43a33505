"""`ray start` with forked workers, with the same arguments as the command `ray`."""

from __future__ import annotations

import os
import runpy

from ray_workers.node import compat_ray
from ray_workers.node.worker_forks import worker_entry

if __name__ == "__main__":
    rays_script = compat_ray.start_workers_by(worker_entry.__file__)
    if rays_script is not None:
        os.environ[worker_entry.RAYS_SCRIPT] = rays_script
    runpy.run_module("ray.scripts.scripts", run_name="__main__", alter_sys=True)
