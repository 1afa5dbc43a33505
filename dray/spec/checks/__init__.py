"""Checks of a job document that concern several of its parts; each raises the first error."""
