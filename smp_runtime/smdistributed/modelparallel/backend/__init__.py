"""SMP's native backend, of which only the errors had public names."""
