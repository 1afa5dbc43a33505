"""How ranks meet, leave, and replace each other: rendezvous, process groups, and state transfer."""
