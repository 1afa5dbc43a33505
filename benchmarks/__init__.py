"""Side-by-side measurements against peers; each prints ratios and says how they were taken."""
