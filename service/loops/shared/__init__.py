"""The parts that all loops share: the fenced database, the jobs as loops see them, their pace."""
