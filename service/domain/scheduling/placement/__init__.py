"""Resources of nodes: which slots a gang gets, and which slots remain free."""
