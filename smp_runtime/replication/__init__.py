"""Data parallelism: gradients, buffers and batches of replicas."""
