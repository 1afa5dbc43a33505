"""Benchmarks that compare dray with peers. Each prints ratios and how they were measured."""
