"""Parallelism for models that are divided among ranks: FSDP, tensor, pipeline and context
parallelism."""
