"""The aggregating rank for clients that are outside the cluster and send their updates as files."""
