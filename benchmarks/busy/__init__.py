"""dray on overloaded machines."""
