"""The aggregating rank for clients outside of the cluster, which send their updates as files."""
