"""The folders of jobs on a node (code, output, checkpoints), and their copies to storage."""
