"""From gradients to parameters: sums over copies, norms, 16 bits, sharded states."""
