"""Names that a script of SMP's examples imports, for a check of SMP's developers."""

from typing import Any, NoReturn

from smp_runtime.errors import NotSupportedError


def dump_model(*args: Any, **kwargs: Any) -> NoReturn:
    """Is not supported.

    Raises:
        NotSupportedError: always.
    """
    raise NotSupportedError("dump_model of SMP's own tests is not supported: use smp.save")


def verify(*args: Any, **kwargs: Any) -> NoReturn:
    """Is not supported.

    Raises:
        NotSupportedError: always.
    """
    raise NotSupportedError(
        "verify of SMP's own tests is not supported: compare losses with a run of one rank"
    )
