"""The types of data sets, and the errors for invalid data."""
