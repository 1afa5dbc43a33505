"""Models that no rank has whole: FSDP, tensor, pipeline and context parallelism."""
