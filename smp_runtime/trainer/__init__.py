"""What transformers' Trainer needs."""
