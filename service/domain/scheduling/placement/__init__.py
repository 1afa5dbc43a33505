"""The resources of nodes: which slots a gang gets, and how much is left."""
