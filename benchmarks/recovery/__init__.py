"""How long a job makes no progress after one of its ranks is killed, and how many steps it
loses."""
