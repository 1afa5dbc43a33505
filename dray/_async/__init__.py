"""The methods of the asynchronous client, by subject."""
