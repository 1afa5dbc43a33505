"""When and how checkpoints are written, and how the newest sound one is found."""
