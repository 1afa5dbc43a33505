"""Export of metrics to TensorBoard: the event file format, and a writer."""
