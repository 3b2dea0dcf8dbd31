"""The names of SageMaker's data parallel library that one of SMP's scripts imports."""
