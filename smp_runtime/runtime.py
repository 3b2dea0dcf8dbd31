"""The one process-wide object: configuration, placement, groups, engine; and `init`."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from . import device
from .config import Config, load_config
from .errors import ConfigError, UsageError
from .execution.clock import Clock
from .execution.engine import Engine
from .execution.last_words import explained, speak_last
from .execution.situation import Observer
from .execution.watchdog import Watchdog
from .launcher_arguments import drop_mp_parameters
from .messages.agreement import check_settings
from .messages.bulletin import FAILURE, Bulletin
from .messages.groups import Groups, start_distributed
from .messages.transport import Transport
from .messages.wire import connect
from .optimization.awaited_parameters import await_all
from .planning.placement import Axis, Coordinates, Placement

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .model import DistributedModel

_log = logging.getLogger("smp_runtime")


class Runtime:
    """What `init` sets up.

    Attributes:
        config: the settings.
        placement: the grid of ranks.
        store: torch's, which all ranks share.
        here: this rank's place on it.
        groups: its process groups.
        engine: runs its steps.
        observer: sees what this rank is doing.
        watchdog: sees when nothing happens, and hears of failures of other ranks.
        model: the one `DistributedModel`, once there is one.
        early_optimizer: an optimizer that was wrapped before the model.
        manual: partitions that the user gave to modules, by identity, with the modules.
        choices: lists of modules among which this package chooses those to checkpoint, by identity;
            with whether random numbers are drawn again, and the bytes that a rank may use.
        has_warned_manual: the user was told that manual placement has no effect.
        at_end: what else is to be closed at the end.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.store = start_distributed(config.timeout, config.ddp_port)
        world, rank = dist.get_world_size(), dist.get_rank()
        self.placement = Placement(
            world,
            config.pipeline_parallel_degree,
            config.tensor_parallel_degree,
            config.placement_strategy,
        )
        if self.placement.size("dp") > 1 and not config.ddp:
            raise ConfigError(
                f"{world} ranks at pipeline_parallel_degree={config.pipeline_parallel_degree} are "
                f"{self.placement.size('dp')} replicas: set ddp to True, or start "
                f"{config.pipeline_parallel_degree} ranks"
            )
        board = f"{next(_boards)}"
        settings = config.model_dump(mode="json")
        check_settings(self.store, board, rank, world, settings, config.timeout)
        self.here: Coordinates = self.placement.coordinates(rank)
        device.use_local_device(local_rank())
        self.groups = Groups(self.placement)
        size = self.placement.size("pp")
        clock = Clock(
            is_on=config.emulate_clock,
            latency=config.emulated_latency_us * 1e-6,
            bandwidth=config.emulated_bandwidth_gbps * 1e9 / 8,
        )
        streams = connect(self.groups.of("pp"), self.here.pp_rank, size, config.timeout)
        members = self.placement.group("pp", rank)
        self.transport = Transport(streams, self.here.pp_rank, clock.read, members)
        self.engine = Engine(
            self.transport,
            policy=config.pipeline,
            active=config.resolved_active_microbatches,
            timeout=config.timeout,
            clock=clock,
            recompute_ahead=config.recompute_ahead,
            recompute_ahead_modules=config.recompute_ahead_modules,
        )
        bulletin = Bulletin(self.store, board, rank)
        self.transport.tell_world = lambda report: bulletin.post(FAILURE, report)
        self.observer = Observer(self.engine, rank)
        self.watchdog = Watchdog(
            bulletin, self.observer, world, config.timeout, self.transport.hear
        )
        self.engine.waits.explain = self.watchdog.explain
        self.engine.find_cause = lambda error: explained(error, self.watchdog)
        self.engine.debug = config.debug
        self.watchdog.start()
        self.model: DistributedModel | None = None
        self.early_optimizer: Optimizer | None = None
        self.manual: dict[int, tuple[Any, int]] = {}
        self.has_warned_manual = False
        self.choices: dict[int, tuple[Any, bool, int]] = {}
        self.at_end: list[Callable[[], None]] = []

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Says what a collective of torch inside is, and which rank's failure made it fail.

        Raises:
            PeerError: it failed because another rank did.
        """
        self.observer.collective = name
        try:
            yield
        except Exception as error:
            cause = self.engine.find_cause(error)
            self.engine.fail(cause)
            if cause is error:
                raise
            raise cause from error
        finally:
            self.observer.collective = ""


_FAREWELL = 5.0
"""Seconds that a rank waits at its end for those that still go on."""

_boards = itertools.count()
_runtime: Runtime | None = None


def init(config: Mapping[str, Any] | str | Path | None = None) -> None:
    """Starts the runtime; the first call of a script.

    Args:
        config: the settings as a dict or the path of a YAML file. What the environment variable
            SM_HP_MP_PARAMETERS says (JSON) goes before it. Defaults everywhere else.

    Raises:
        ConfigError: a setting is unknown, out of range, or does not fit the number of ranks.
    """
    global _runtime
    if _runtime is not None:
        _log.warning("smp is initialized already. Ignoring this call of smp.init")
        return
    _show_log_lines()
    drop_mp_parameters(sys.argv)
    _runtime = Runtime(load_config(config, os.environ))
    atexit.register(_end)
    speak_last(_runtime.engine, _runtime.watchdog)


def shutdown() -> None:
    """Ends the runtime, so that `init` may be called again. torch.distributed goes on."""
    global _runtime
    if _runtime is not None:
        _await_parameters(_runtime)
        atexit.unregister(_end)
        _leave()
        _runtime = None


def _end() -> None:
    if _runtime is not None:
        try:
            _await_parameters(_runtime)
        except Exception as error:  # noqa: BLE001 - Python would go on, and end without an error
            sys.excepthook(type(error), error, error.__traceback__)
            _leave()
            os._exit(1)
    _leave()


def _await_parameters(runtime: Runtime) -> None:
    """Waits for parameters that are under way, and so for other replicas that need this one's."""
    if runtime.transport.failure is None and not runtime.transport.is_closed:
        await_all()


def _leave() -> None:
    if _runtime is None:
        return
    transport = _runtime.transport
    has_failed = transport.has_raised or transport.is_closed
    transport.leave()
    if not has_failed:
        _runtime.watchdog.take_leave(_FAREWELL)
    _runtime.watchdog.stop()
    for close in _runtime.at_end:
        close()
    transport.close(_FAREWELL)
    if transport.failure is not None and not transport.has_raised:
        # This rank had done its part when another one failed; the job has failed all the same.
        print(f"smp_runtime: another rank failed: {transport.failure}", file=sys.stderr, flush=True)
        os._exit(1)


def is_initialized() -> bool:
    """Says whether `init` was called."""
    return _runtime is not None


def current() -> Runtime:
    """Returns the runtime.

    Raises:
        UsageError: `init` was not called.
    """
    if _runtime is None:
        raise UsageError("call smp.init() first")
    return _runtime


def _show_log_lines() -> None:
    """Prints this package's log lines where the user's script has no logging of its own."""
    if not _log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(
            logging.Formatter("[%(asctime)s.%(msecs)03d: %(levelname).1s] %(message)s", "%H:%M:%S")
        )
        _log.addHandler(handler)
        _log.setLevel(logging.INFO)
        _log.propagate = False


# -- ranks and sizes -----------------------------------------------------------------------------


def rank() -> int:
    """Returns the global rank."""
    current()
    return dist.get_rank()


def size() -> int:
    """Returns the number of ranks."""
    current()
    return dist.get_world_size()


def local_rank() -> int:
    """Returns the rank on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_size() -> int:
    """Returns the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def pp_rank() -> int:
    """Returns the rank in the pipeline group, which is the index of the partition."""
    return current().here.pp_rank


def tp_rank() -> int:
    """Returns the rank in the tensor parallel group."""
    return current().here.tp_rank


def rdp_rank() -> int:
    """Returns the rank in the reduced data parallel group."""
    return current().here.rdp_rank


def dp_rank() -> int:
    """Returns the rank in the data parallel group."""
    return current().here.dp_rank


def mp_rank() -> int:
    """Returns the rank in the model parallel group."""
    return current().here.mp_rank


def pp_size() -> int:
    """Returns the size of the pipeline group."""
    return current().placement.size("pp")


def tp_size() -> int:
    """Returns the size of the tensor parallel group."""
    return current().placement.size("tp")


def rdp_size() -> int:
    """Returns the size of the reduced data parallel group."""
    return current().placement.size("rdp")


def dp_size() -> int:
    """Returns the size of the data parallel group."""
    return current().placement.size("dp")


def mp_size() -> int:
    """Returns the size of the model parallel group."""
    return current().placement.size("mp")


def get_pp_group() -> list[int]:
    """Returns the global ranks of the pipeline group."""
    return _members("pp")


def get_tp_group() -> list[int]:
    """Returns the global ranks of the tensor parallel group."""
    return _members("tp")


def get_rdp_group() -> list[int]:
    """Returns the global ranks of the reduced data parallel group."""
    return _members("rdp")


def get_dp_group() -> list[int]:
    """Returns the global ranks of the data parallel group."""
    return _members("dp")


def get_mp_group() -> list[int]:
    """Returns the global ranks of the model parallel group."""
    return _members("mp")


def get_world_process_group() -> dist.ProcessGroup | None:
    """Returns the process group of all ranks."""
    return current().groups.of("world")


def get_pp_process_group() -> dist.ProcessGroup | None:
    """Returns the process group of the pipeline."""
    return current().groups.of("pp")


def get_tp_process_group() -> dist.ProcessGroup | None:
    """Returns the process group of tensor parallelism."""
    return current().groups.of("tp")


def get_rdp_process_group() -> dist.ProcessGroup | None:
    """Returns the process group of reduced data parallelism."""
    return current().groups.of("rdp")


def get_dp_process_group() -> dist.ProcessGroup | None:
    """Returns the process group of data parallelism."""
    return current().groups.of("dp")


def get_mp_process_group() -> dist.ProcessGroup | None:
    """Returns the process group of model parallelism."""
    return current().groups.of("mp")


def _members(axis: Axis) -> list[int]:
    return list(current().placement.group(axis, dist.get_rank()))
