"""Networks of the recipes; each file says what goes in and what comes out."""
