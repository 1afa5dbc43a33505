"""Models that no rank holds whole: FSDP, tensor, pipeline and context parallelism."""
