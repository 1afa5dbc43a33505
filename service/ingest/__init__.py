"""Checks the reports of attempts frame by frame, and stores them together with the cursor."""
