"""The package of SMP's own tests, from which a script of its examples imports."""
