"""The importance of parameters for a metric, estimated in a separate process."""
