"""SMP's process-wide state, as far as scripts read it."""

from typing import Any, NoReturn

from smp_runtime.config import Config
from smp_runtime.errors import NotSupportedError
from smp_runtime.runtime import current


class ModuleManager:
    """What scripts ask SMP's keeper of modules.

    Attributes:
        translate_functions: pairs of functions between SMP's and Hugging Face's state dicts. There
            are none: state dicts have the names of the plain model.
    """

    translate_functions: tuple[Any, ...] = ()


class State:
    """What `smp.state` is."""

    module_manager = ModuleManager()

    @property
    def cfg(self) -> Config:
        """The settings of this job.

        Raises:
            UsageError: `init` was not called.
        """
        return current().config

    @property
    def param_index_to_name_tp_group(self) -> NoReturn:
        """Names of parameters of the tensor group, which SMP's early float16 scripts read.

        Raises:
            NotSupportedError: always.
        """
        _refuse("param_index_to_name_tp_group")

    @property
    def param_name_to_index_tp_group(self) -> NoReturn:
        """Places of parameters of the tensor group, which SMP's early float16 scripts read.

        Raises:
            NotSupportedError: always.
        """
        _refuse("param_name_to_index_tp_group")


def _refuse(name: str) -> NoReturn:
    raise NotSupportedError(
        f"smp.state.{name} is not supported yet: float16 by a script's own optimizer, as before "
        "SMP 1.10, has no counterpart here; train in float32 or under torch.autocast"
    )


state = State()
