"""The folders of jobs on a node (code, output, checkpoints), and copying them to the storage."""
