"""Rules of sweeps: the values of each trial, which trials stop early, and which trial is the
best."""
