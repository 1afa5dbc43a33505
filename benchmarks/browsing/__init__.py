"""The web page in a browser: how soon it shows its content, and how much open pages slow
training."""
