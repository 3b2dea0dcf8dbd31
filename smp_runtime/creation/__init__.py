"""Models made without memory, and the values that each rank's part gets."""
