"""When and how checkpoints are written, and how the newest intact one is found."""
