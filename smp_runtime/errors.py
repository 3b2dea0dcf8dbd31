"""Every error that this package raises on purpose.

All derive from `SMPError`. Those for a user's mistake are also the built-in error that plain
PyTorch code would raise, so that an `except ValueError` written for it still works.
"""


class SMPError(RuntimeError):
    """An error raised by this package."""


class ConfigError(SMPError, ValueError):
    """A setting is unknown, out of range, or in conflict with another one."""


class PartitionError(SMPError, ValueError):
    """The modules of the model cannot be assigned to the pipeline ranks as asked."""


class ScheduleError(SMPError):
    """The actions of a step cannot be put in an order that ends."""


class MicrobatchError(SMPError, ValueError):
    """A step's arguments cannot be split into equal microbatches."""


class NotSupportedError(SMPError, NotImplementedError):
    """The request is valid, but this version cannot fulfil it."""


class PathMismatchError(SMPError):
    """Two ranks took different paths through the same step."""


class PeerError(SMPError):
    """Another rank failed, so this one cannot go on.

    Args:
        message: what is known of the failure.
        rank: the global rank that failed first, None where nobody could tell.
        is_told: the message is that rank's own report; else the rank vanished or left.
    """

    def __init__(self, message: str, rank: int | None = None, is_told: bool = False) -> None:
        super().__init__(message)
        self.rank = rank
        self.is_told = is_told

    def __reduce__(self) -> tuple[type["PeerError"], tuple[str, int | None, bool]]:
        # The default passes `self.args` only and would lose the rank on its way between processes.
        return type(self), (str(self), self.rank, self.is_told)


class ConnectionLostError(SMPError, ConnectionError):
    """A rank closed its connection to this one, which still needs it; why is not known here."""


class NonFiniteLossError(SMPError, FloatingPointError):
    """A loss is not a number, or infinite; looked for where the setting `debug` is on."""


class WaitTimeoutError(SMPError, TimeoutError):
    """A wait for another rank took longer than the setting `timeout` allows."""


class UsageError(SMPError):
    """A function was called at a time or place where it has no meaning."""


class CheckpointError(SMPError):
    """A checkpoint cannot be written, or not be resumed from."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint where one was looked for."""


class CheckpointIncompleteError(CheckpointError):
    """Saving a checkpoint was interrupted, or a part of it is missing."""


class CheckpointDamagedError(CheckpointError):
    """A file of a checkpoint is truncated, or not what its index says."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint does not fit the model or the optimizer."""


class CheckpointWriteError(CheckpointError, OSError):
    """A file of a checkpoint could not be written: the disk is full, say."""


class UnsafeContentError(CheckpointError):
    """A file holds pickled code, which nobody has allowed to run."""


class RecomputationError(SMPError):
    """The second forward of a checkpointed call is not like its first one."""
