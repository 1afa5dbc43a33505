"""Settings, logging, and the lock on the home directory."""
