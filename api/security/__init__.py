"""Access control: tokens, and the hosts and origins that may call."""
