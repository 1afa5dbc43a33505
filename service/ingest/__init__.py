"""What attempts report: it is checked frame by frame and stored with the cursor."""
