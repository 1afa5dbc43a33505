"""The supervisor of one attempt: its worker group, monitoring and recovery."""
