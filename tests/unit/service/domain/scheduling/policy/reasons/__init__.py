"""The statements in the messages of a plan, and slow checks that they are true."""
