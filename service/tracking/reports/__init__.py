"""Reports: pages of Markdown with charts and tables of runs."""
