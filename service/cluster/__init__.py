"""The seam to the cluster: a port, and the Ray side of it in `service.cluster.ray`."""
