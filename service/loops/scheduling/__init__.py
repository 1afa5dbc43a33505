"""What starts, where and when: the queue and the cluster are watched, and plans are applied."""
