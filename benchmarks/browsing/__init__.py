"""The web page in a browser: how soon it shows what it has, and what open pages cost training."""
