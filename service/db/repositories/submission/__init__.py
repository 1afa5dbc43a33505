"""SQL on what a submit makes or looks up: arrays, sweeps, dependencies, code, idempotency keys."""
