"""Models that are not complete on any rank: FSDP, tensor, pipeline and context parallelism."""
