"""The rules that the supervisor goes by: pure, without ray or torch."""
