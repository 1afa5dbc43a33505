"""From the updates of a round to one: which of them count, what they come to, and what stays."""
