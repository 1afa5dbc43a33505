"""The parts that all loops share: the fenced database, the jobs as loops see them, and their pace."""
