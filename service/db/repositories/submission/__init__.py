"""SQL for submits: arrays, sweeps, dependencies, code and idempotency keys."""
