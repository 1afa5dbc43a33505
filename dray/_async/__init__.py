"""The methods of the asynchronous client, grouped by subject."""
