"""SQL for submissions: arrays, sweeps, dependencies, code and idempotency keys."""
