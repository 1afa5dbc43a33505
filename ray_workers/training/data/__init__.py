"""Loading batches from a data set to the device: sampling, loader processes, and prefetching."""
