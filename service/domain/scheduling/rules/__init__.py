"""Who comes first, who is kept back, who makes room, and the sentences that say so."""
