"""The ground of all loops: the fenced database, the jobs as loops see them, and their pace."""
