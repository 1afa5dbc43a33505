"""Side-by-side measurements against peers; each prints ratios and how they were measured."""
