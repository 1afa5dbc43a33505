"""How long a job stands still when one of its ranks is killed, and what it loses."""
