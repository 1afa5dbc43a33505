"""Access control: tokens, and the allowed hosts and origins."""
