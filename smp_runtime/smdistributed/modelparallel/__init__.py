"""The names of SageMaker's model parallel library.

`__version__` is the version of SMP's API whose names exist here, its last one. Scripts compare it
to decide what they may call. The version of this project is that of the distribution smp-runtime.
"""

__version__ = "1.15.0"
