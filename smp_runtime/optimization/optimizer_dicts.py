"""State dicts of an optimizer whose parameters live on several ranks, in torch's own form.

Numbers of parameters are those of the whole optimizer, so the whole state dict loads into a plain
one, and a plain one's loads here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..errors import CheckpointMismatchError, UsageError
from ..runtime import Runtime, current, is_initialized
from ..saving.optimizer_state import (
    NamesItsState,
    Piece,
    load_local_state,
    local_state,
    needed_names,
    parameter_names,
)
from ..saving.state import merged
from .optimizer_shard import SHARD, as_shard, check_held, is_sharded, pieces_of

PARTIAL = "_smp_is_partial"


class StateDicts:
    """What an optimizer over several ranks has in place of torch's own methods."""

    _whole_groups: list[list[nn.Parameter]] | None = None

    def remember_groups(self) -> None:
        """Called before parameters of other ranks are taken out of the groups."""
        known = self._whole_groups or []
        given: Any = vars(self)["param_groups"]
        self._whole_groups = known + [list(group["params"]) for group in given[len(known) :]]

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole state dict on every rank. Every rank of the pipeline calls it.

        With `shard_optimizer_state` every rank of the job does.
        """
        runtime = self._runtime()
        if runtime is None:
            whole: dict[str, Any] = super().state_dict()  # type: ignore[misc]
            return whole
        packed = self._packed(runtime)
        joined = merged(_flat(packed.pop("state")), runtime.engine, "optimizer.state_dict")
        return {"state": _nested(joined), **packed}

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """Returns the state of the parameters on this rank, and the settings of all groups.

        Args:
            gather_if_shard: with `shard_optimizer_state`, join the shards of all replicas, so that
                every rank calls it. False returns this rank's shard alone, which loads on the same
                rank of the same layout; save it by ``smp.save(..., v3=True)``.
        """
        runtime = self._runtime()
        if runtime is None:
            return {**super().state_dict(), PARTIAL: True}  # type: ignore[misc]
        return {**self._packed(runtime, gather_if_shard), PARTIAL: True}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state dict, whole, in parts, or of one's own shard. Every rank calls it.

        Before the partitioning settings of groups are set at once, and the rest in the first step.

        Raises:
            CheckpointMismatchError: groups have other numbers of parameters, or the shard is that
                of another rank, layout or partition.
            UsageError: a shard is loaded before the model is wrapped.
        """
        runtime = self._runtime()
        is_shard = SHARD in state_dict
        if is_shard and is_initialized() and current().model is None:
            raise UsageError("load a shard of the optimizer's state after smp.DistributedModel")
        state = pieces_of(state_dict, runtime) if is_shard else state_dict["state"]
        if runtime is None:
            plain = {key: value for key, value in state_dict.items() if key != PARTIAL}
            super().load_state_dict(plain)  # type: ignore[misc]
            return
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [
            len(group) for group in self._all_groups()
        ]:
            raise CheckpointMismatchError(
                "the state dict's parameter groups have other numbers of parameters than those of "
                "the optimizer; build the optimizer as it was"
            )
        if state_dict.get(PARTIAL) and not is_shard:
            state = _nested(merged(_flat(state), runtime.engine, "optimizer.load_state_dict"))
        assert runtime.model is not None
        names = parameter_names(runtime.model.get_module())
        parameters = [parameter for group in self._all_groups() for parameter in group]
        named = {names[id(parameters[number])]: values for number, values in state.items()}
        optimizer: Any = self
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

        def load() -> None:
            if is_shard:
                check_held(named, needed_names(optimizer, names))
            load_local_state(optimizer, named, names)

        runtime.model.when_partitioned(load)
        if isinstance(optimizer, NamesItsState) and "loss_scaler" in state_dict:
            optimizer.load_loss_scaler_state(state_dict["loss_scaler"])

    def _runtime(self) -> Runtime | None:
        """Returns the runtime where torch's own methods don't do."""
        runtime = current() if is_initialized() else None
        if runtime is None or runtime.model is None:
            return None
        is_plain = runtime.placement.size("pp") == 1 and not isinstance(self, NamesItsState)
        return None if is_plain else runtime

    def _all_groups(self) -> list[list[nn.Parameter]]:
        given: Any = vars(self)["param_groups"]
        return self._whole_groups or [list(group["params"]) for group in given]

    def _packed(self, runtime: Runtime, joins_shards: bool = True) -> dict[str, Any]:
        """Returns a state dict with the state on this rank only."""
        assert runtime.model is not None
        optimizer: Any = self
        names = parameter_names(runtime.model.get_module())
        groups = self._all_groups()
        parameters = [parameter for group in groups for parameter in group]
        numbers = {names[id(parameter)]: n for n, parameter in enumerate(parameters)}
        state = local_state(optimizer, names)
        if is_sharded(runtime) and joins_shards:
            shapes = {names[id(parameter)]: tuple(parameter.shape) for parameter in parameters}
            state = _joined_over_replicas(state, shapes, runtime)
        begins = [sum(map(len, groups[:index])) for index in range(len(groups))]
        packed: dict[str, Any] = {
            "state": {numbers[name]: dict(values) for name, values in state.items()},
            "param_groups": [
                {
                    **{key: value for key, value in settings.items() if key != "params"},
                    "params": list(range(begin, begin + len(group))),
                }
                for settings, group, begin in zip(
                    optimizer.param_groups, groups, begins, strict=True
                )
            ],
        }
        if isinstance(optimizer, NamesItsState) and (scaler := optimizer.loss_scaler_state()):
            packed["loss_scaler"] = scaler
        return packed if joins_shards or not is_sharded(runtime) else as_shard(packed, runtime)


def _joined_over_replicas(
    state: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]], runtime: Runtime
) -> dict[str, dict[str, Any]]:
    """Makes whole tensors of the pieces on the replicas."""
    everyone: list[Any] = [None] * runtime.placement.size("rdp")
    pickled = {name: dict(values) for name, values in state.items()}
    dist.all_gather_object(everyone, pickled, group=runtime.groups.of("rdp"))
    joined: dict[str, dict[str, Any]] = {}
    for replica in everyone:
        for name, values in replica.items():
            for kind, value in values.items():
                mine = joined.setdefault(name, {})
                if not isinstance(value, Piece):
                    mine.setdefault(kind, value)
                    continue
                count = 1
                for length in shapes[name]:
                    count *= length
                whole = mine.setdefault(kind, value.values.new_empty(count))
                whole[value.start : value.start + len(value.values)] = value.values
    return {
        name: {
            kind: value.view(shapes[name]) if isinstance(value, Tensor) and value.dim() else value
            for kind, value in values.items()
        }
        for name, values in joined.items()
    }


def _flat(state: Mapping[int, Mapping[str, Any]]) -> dict[Any, Any]:
    """Lists the state by number and kind, as `state.merged` takes it."""
    return {(n, kind): value for n, values in state.items() for kind, value in values.items()}


def _nested(entries: Mapping[Any, Any]) -> dict[int, dict[str, Any]]:
    nested: dict[int, dict[str, Any]] = {}
    for number, kind in sorted(entries, key=lambda key: key[0]):
        nested.setdefault(number, {})[kind] = entries[number, kind]
    return nested
