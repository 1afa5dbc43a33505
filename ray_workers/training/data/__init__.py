"""From a data set to batches on the device: sampling, loader processes, prefetching."""
