"""dray on machines whose processors have more to do than they can."""
