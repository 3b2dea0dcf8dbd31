"""Model-parallel training of unmodified PyTorch models."""
