"""Messages between ranks for scripts: any picklable object, outside steps.

What arrives is unpickled, which runs code that the sender chose. All ranks of a job trust each
other; none of this is for data from elsewhere.
"""

from __future__ import annotations

import io
from enum import Enum
from typing import Any, cast

import torch
import torch.distributed as dist

from .. import device
from ..errors import PeerError, UsageError
from ..execution.body import current_body
from ..planning.placement import Axis
from ..runtime import current


class CommGroup(Enum):
    """The ranks that take part in a collective call."""

    WORLD = "world"
    MP_GROUP = "mp"
    DP_GROUP = "dp"
    PP_GROUP = "pp"
    TP_GROUP = "tp"
    RDP_GROUP = "rdp"


class RankType(Enum):
    """What a rank's number counts: its place in the world or in one of this rank's groups."""

    WORLD_RANK = "world"
    MP_RANK = "mp"
    DP_RANK = "dp"
    PP_RANK = "pp"
    TP_RANK = "tp"
    RDP_RANK = "rdp"


WORLD = CommGroup.WORLD
MP_GROUP = CommGroup.MP_GROUP
DP_GROUP = CommGroup.DP_GROUP
PP_GROUP = CommGroup.PP_GROUP
TP_GROUP = CommGroup.TP_GROUP
RDP_GROUP = CommGroup.RDP_GROUP


def broadcast(obj: Any, group: CommGroup) -> None:
    """Sends an object to all other ranks of a group; each of them calls `recv_from`.

    Args:
        obj: anything that can be pickled. Tensors arrive on the receiver's device.
        group: one of this rank's groups.

    Raises:
        UsageError: called inside a step over several pipeline ranks, or `group` is no `CommGroup`.
        PeerError: a rank of the group ended, or took longer than the setting `timeout`.
    """
    here = dist.get_rank() if dist.is_initialized() else 0
    packed = _pack(obj)
    for member in _members(group, CommGroup, "broadcast"):
        if member != here:
            _send(packed, member, "broadcast")


def send(obj: Any, dest_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> None:
    """Sends an object to one rank, which calls `recv_from`.

    Args:
        obj: anything that can be pickled. Tensors arrive on the receiver's device.
        dest_rank: the receiver.
        rank_type: what `dest_rank` counts.

    Raises:
        UsageError: called inside a step over several pipeline ranks, or there is no such rank.
        PeerError: the receiver ended, or took longer than the setting `timeout`.
    """
    _send(_pack(obj), _global(dest_rank, rank_type, "send"), "send")


def recv_from(src_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> Any:
    """Waits for the next object that a rank sent or broadcast to this one, and returns it.

    Args:
        src_rank: the sender.
        rank_type: what `src_rank` counts.

    Raises:
        UsageError: called inside a step over several pipeline ranks, or there is no such rank.
        PeerError: the sender ended, or took longer than the setting `timeout`.
    """
    source = _global(src_rank, rank_type, "recv_from")
    received: list[Any] = [None]
    try:
        dist.recv_object_list(received, src=source, device=torch.device("cpu"))
    except RuntimeError as error:
        raise _peer_error("recv_from", source, error) from error
    return _unpack(received[0])


def allgather(obj: Any, group: CommGroup) -> list[Any]:
    """Returns the objects of all ranks of a group, in the order of their ranks in it.

    Args:
        obj: anything that can be pickled. Tensors arrive on the receiver's device.
        group: all its ranks call this.

    Raises:
        UsageError: called inside a step over several pipeline ranks, or `group` is no `CommGroup`.
        PeerError: a rank of the group ended, or took longer than the setting `timeout`.
    """
    members = _members(group, CommGroup, "allgather")
    gathered: list[Any] = [None] * len(members)
    try:
        dist.all_gather_object(gathered, _pack(obj), group=current().groups.of(group.value))
    except RuntimeError as error:
        raise _peer_error("allgather", None, error) from error
    return [_unpack(packed) for packed in gathered]


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Waits for all ranks of a group."""
    _members(group, CommGroup, "barrier")
    with current().collective(f"smp.barrier of {group.name}"):
        dist.barrier(group=current().groups.of(group.value))


def pp_barrier() -> None:
    """Waits for the pipeline group."""
    barrier(CommGroup.PP_GROUP)


def mp_barrier() -> None:
    """Waits for the model parallel group."""
    barrier(CommGroup.MP_GROUP)


def dp_barrier() -> None:
    """Waits for the data parallel group."""
    barrier(CommGroup.DP_GROUP)


def _members(group: Any, kind: type[Enum], call: str) -> tuple[int, ...]:
    """Returns the global ranks of one of this rank's groups."""
    runtime = current()
    if not isinstance(group, kind):
        names = ", ".join(f"smp.{kind.__name__}.{member.name}" for member in kind)
        raise UsageError(f"smp.{call} was given {group!r}: write one of {names}")
    if runtime.placement.size("pp") > 1 and current_body() is not None:
        # Bodies take turns in an order that differs from rank to rank.
        raise UsageError(f"smp.{call} was called inside a step: call it before or after the step")
    return runtime.placement.group(cast(Axis, group.value), dist.get_rank())


def _global(rank: int, rank_type: RankType, call: str) -> int:
    """Returns the global number of another rank."""
    members = _members(rank_type, RankType, call)
    if not 0 <= rank < len(members):
        raise UsageError(
            f"smp.{call} was given the {rank_type.name} {rank}: there are 0 to {len(members) - 1}"
        )
    if members[rank] == dist.get_rank():
        raise UsageError(f"smp.{call} was given this rank's own {rank_type.name} {rank}")
    return members[rank]


def _send(packed: bytes, receiver: int, call: str) -> None:
    try:
        dist.send_object_list([packed], dst=receiver, device=torch.device("cpu"))
    except RuntimeError as error:
        raise _peer_error(call, receiver, error) from error


def _peer_error(call: str, rank: int | None, error: RuntimeError) -> PeerError:
    whom = "the other ranks of the group" if rank is None else f"rank {rank}"
    return PeerError(
        f"smp.{call} did not reach {whom}, which ended, failed, or did not make the matching call "
        f"within the setting `timeout`: {error}",
        rank,
    )


def _pack(obj: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


def _unpack(packed: bytes) -> Any:
    move: Any = _to_local
    return torch.load(io.BytesIO(packed), map_location=move, weights_only=False)


def _to_local(storage: torch.UntypedStorage, place: str) -> torch.UntypedStorage:
    """Puts what was on the sender's accelerator on this rank's, and leaves the rest."""
    target = device.local(torch.device(place))
    return storage.to(device=target) if target.type == "cuda" else storage
