"""The rules that the supervisor follows: pure, without ray or torch."""
