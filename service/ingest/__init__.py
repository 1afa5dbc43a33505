"""Reports of attempts: checked frame by frame, and stored together with the cursor."""
