"""Example job documents and scripts. A test submits each of them."""
