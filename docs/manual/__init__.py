"""Manual pages that are generated from the code, and the Sphinx extension that adds them."""
