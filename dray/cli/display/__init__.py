"""Terminal output: tables, plots, progress bars and live progress."""
