"""The resources of nodes: which slots a gang gets, and what remains free."""
