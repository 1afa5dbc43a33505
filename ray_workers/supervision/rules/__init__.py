"""The rules that the supervisor follows, as pure code without Ray or torch."""
