"""The errors of `smp_runtime`, all of them, where SageMaker's launcher looks for them."""

from smp_runtime.errors import *  # noqa: F403
