"""The module of `StepOutput`. The package's attribute of this name is the decorator."""

from smp_runtime import StepOutput, step
from smp_runtime.step_function import StepFunction

__all__ = ["StepFunction", "StepOutput", "step"]
