"""What the sentences of a plan state, and a slow look at whether it is so."""
