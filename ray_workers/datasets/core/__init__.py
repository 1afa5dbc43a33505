"""The types of data sets, and the errors of invalid data sets."""
