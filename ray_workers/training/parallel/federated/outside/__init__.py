"""The rank that aggregates for clients outside of the cluster, whose updates come as files."""
