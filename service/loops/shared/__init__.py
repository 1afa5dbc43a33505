"""What all loops stand on: the fenced database, the jobs as loops see them, and their pace."""
