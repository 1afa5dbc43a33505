"""Resources of nodes, which slots of them a gang gets, and how much is left."""
