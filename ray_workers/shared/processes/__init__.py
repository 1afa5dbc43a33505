"""Processes of a machine: signals, deadlines, stacks, and the machine's speed."""
