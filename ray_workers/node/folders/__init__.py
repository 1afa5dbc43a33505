"""Manages the folders of jobs on a node (code, output, checkpoints), and copies them to the
storage."""
