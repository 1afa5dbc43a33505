"""What nodes have, which slots of it a gang gets, and how much is left."""
