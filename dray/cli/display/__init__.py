"""Output on a terminal: tables, plots, bars and live progress."""
