"""Plans made before anything runs: what goes where, and in which order. No tensors."""
