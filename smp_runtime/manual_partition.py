"""Manual placement: `smp.partition(i)` around creation, `smp.set_partition` afterwards."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .errors import PartitionError
from .runtime import current

_log = logging.getLogger("smp_runtime")


@contextmanager
def partition(index: int) -> Iterator[None]:
    """Places the modules created inside; the innermost context wins.

    Without effect, but for a warning, where `auto_partition` is on.

    Args:
        index: the partition, which is a pipeline rank.

    Raises:
        PartitionError: there is no such partition.
    """
    _check(index)
    native = nn.Module.__init__

    @functools.wraps(native)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        native(self, *args, **kwargs)
        # An inner context's `native` is the outer one's `init`: the innermost speaks last.
        current().manual[id(self)] = (self, index)

    nn.Module.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__init__ = native  # type: ignore[method-assign]


def set_partition(module: nn.Module, index: int) -> None:
    """Places a module and everything in it that is not placed otherwise.

    Args:
        module: a part of the model; call this before the first step.
        index: the partition, which is a pipeline rank.

    Raises:
        PartitionError: there is no such partition, or the model is partitioned already.
    """
    _check(index)
    runtime = current()
    if runtime.model is not None and runtime.model.partition is not None:
        raise PartitionError(
            "set_partition was called after the first step; the model is partitioned already"
        )
    runtime.manual[id(module)] = (module, index)


def _check(index: int) -> None:
    runtime = current()
    size = runtime.placement.size("pp")
    if not 0 <= index < size:
        raise PartitionError(
            f"partition {index} does not exist: pipeline_parallel_degree is {size}, so partitions "
            f"are 0 to {size - 1}"
        )
    if runtime.config.auto_partition and not runtime.has_warned_manual:
        runtime.has_warned_manual = True
        _log.warning(
            "manual placement is ignored because auto_partition is on; set auto_partition to "
            "False and default_partition to the home of all other modules"
        )
