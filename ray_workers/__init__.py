"""Everything that runs on the cluster; imports neither `service` nor `api`."""
