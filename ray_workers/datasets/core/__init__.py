"""The types of data sets, and the errors of bad ones."""
