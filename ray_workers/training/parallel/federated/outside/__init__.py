"""The rank that aggregates for clients outside of the cluster, whose updates are files."""
