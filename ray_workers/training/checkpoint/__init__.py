"""Writing checkpoints, and finding the latest intact one."""
