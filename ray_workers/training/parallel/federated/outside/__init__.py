"""The aggregating rank for clients outside the cluster, which send their updates as files."""
