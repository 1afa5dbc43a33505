"""Export the metrics of jobs to TensorBoard: the event file format, and a writer."""
