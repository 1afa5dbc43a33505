"""The port to the cluster, and its implementation for Ray in `service.cluster.ray`."""
