"""What a model does in one call, found out without running it for real."""
