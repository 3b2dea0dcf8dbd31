"""Of SMP's own tests for PyTorch."""
