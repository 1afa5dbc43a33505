"""Pages of the manual that are made from the code, and the extension of Sphinx that adds them."""
