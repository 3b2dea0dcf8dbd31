"""Which marked modules can be checkpointed where they lie, and what the log says of them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping

import torch.distributed as dist
from torch import nn

from ..errors import PartitionError
from ..execution.ownership import PlacedModule
from ..execution.placed import placement_of
from ..planning.partition_table import in_ranges
from ..replication.roll_call import RollCall
from ..runtime import current
from .checkpointed_modules import Mark, mark_of, path_of, set_mark
from .checkpointing_choice import Costs, Measurement, RankChoice, choose_all
from .measured_memory import marks_in

_log = logging.getLogger("smp_runtime")

_MOST_NAMES = 6


def choose_modules(model: nn.Module, costs: Costs) -> list[tuple[str, bool]]:
    """Makes the choices that were left to this package.

    Returns:
        The paths of the chosen modules, and whether their random numbers are drawn again.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    found: list[tuple[str, bool]] = []
    for module, preserve_rng_state, budget in current().choices.values():
        names = [paths[id(layer)] for layer in module.children() if id(layer) in paths]
        for choice in choose_all(costs, names, [budget]):
            _log.info("%s", choice)
            found += [(path, preserve_rng_state) for path in choice.paths]
    return found


def choose_again(
    module: nn.Module, costs: Costs | None, measured: Measurement, how: tuple[bool, int]
) -> None:
    """Chooses among the layers of a module by what steps measured; every rank calls it.

    Args:
        module: the list of layers.
        costs: of the model, on rank 0.
        measured: what training steps took on this rank.
        how: whether random numbers are drawn again, and bytes that this rank may use.
    """
    runtime = current()
    plain = runtime.model.get_module() if runtime.model is not None else module
    paths = {id(part): path for path, part in plain.named_modules()}
    names = [paths[id(layer)] for layer in module.children() if id(layer) in paths]
    fixed = set(marks_in(plain)) - {paths.get(id(module)), *names}
    roll = RollCall("smp.set_activation_checkpointing with strategy='auto'")
    told = roll.gather(lambda: (runtime.here.pp_rank, how[1], measured))

    def choose() -> list[RankChoice]:
        assert costs is not None, "rank 0 traces"
        peaks: dict[int, Measurement] = {}
        budgets: dict[int, int] = {}
        for rank, budget, peak in told:  # of all replicas
            peaks[rank] = peaks.get(rank, Measurement()) | peak
            budgets[rank] = min(budgets.get(rank, budget), budget)
        ranks = sorted(peaks)
        return choose_all(
            costs, names, [budgets[rank] for rank in ranks], [peaks[rank] for rank in ranks], fixed
        )

    choices = roll.from_first(choose)
    for part in (module, *module.children()):
        set_mark(part, None)
    for choice in choices:
        if dist.get_rank() == 0:
            _log.info("%s", choice)
        mark_chosen(plain, [(path, how[0]) for path in choice.paths])


def mark_chosen(model: nn.Module, chosen: Iterable[tuple[str, bool]]) -> None:
    """Marks the chosen modules, on every rank."""
    for path, preserve_rng_state in chosen:
        set_mark(model.get_submodule(path), Mark("each", preserve_rng_state))


def check_all_marks(model: nn.Module) -> None:
    """Warns of marked modules that can't be checkpointed, once they are placed.

    Raises:
        PartitionError: they were placed by hand.
    """
    check_marks([module for module in model.modules() if mark_of(module) is not None])


def check_marks(modules: list[nn.Module]) -> None:
    """Does the same for some modules."""
    for module in modules:
        is_sequence = isinstance(module, nn.Sequential) and not is_whole(module)
        units: Iterable[nn.Module] = module.children() if is_sequence else [module]
        for unit in units:
            if not is_whole(unit):
                refuse(unit)


def assignment_lines(model: nn.Module) -> str:
    """Returns what the log of the partition says of activation checkpointing, "" for nothing."""
    by_home: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        mark = mark_of(module)
        if mark is None or (_ranks_of(module) and not is_whole(module) and mark.strategy == "each"):
            continue
        name = "/".join(["main", *filter(None, path.split("."))])
        if mark.strategy != "each":
            name = f"{name} ({mark.strategy})"
        by_home.setdefault(in_ranges(_ranks_of(module)), []).append(name)
    lines = [
        f"\nactivation checkpointing on {home}: {', '.join(names)}"
        for home, names in by_home.items()
    ]
    return "".join(lines)


# -- where a module lives --------------------------------------------------------------------------


def is_partitioned() -> bool:
    """Says whether modules have their ranks."""
    model = current().model
    return model is not None and model.partition is not None


def _placed() -> Mapping[str, PlacedModule]:
    return current().engine.ownership.placed


def _inside(module: nn.Module) -> set[int]:
    return {id(part) for part in module.modules()}


def is_whole(module: nn.Module) -> bool:
    """Says whether a module is on one rank as a whole, or has nothing that is on any."""
    if placement_of(module) is not None or not _ranks_of(module):
        return True
    return any(part is module for placed in _placed().values() for _, part in placed.modules)


def _ranks_of(module: nn.Module) -> list[int]:
    owner_of = current().engine.ownership.owner_of
    tensors = (*module.parameters(), *module.buffers())
    return sorted({owner for tensor in tensors if (owner := owner_of(tensor)) is not None})


def refuse(module: nn.Module) -> None:
    """Warns once that a module can't be checkpointed.

    Raises:
        PartitionError: it was placed by hand.
    """
    runtime = current()
    message = _why_not(module)
    if not runtime.config.auto_partition:
        raise PartitionError(f"{message}; place it on one rank, or checkpoint its parts")
    if dist.get_rank() == 0:
        _warn(f"{message}; it runs without activation checkpointing")


@functools.cache
def _warn(message: str) -> None:
    _log.warning("%s", message)


def _why_not(module: nn.Module) -> str:
    parts = _inside(module)
    nearest = [p for p, placed in _placed().items() if id(placed.modules[0][1]) in parts]
    named = ", ".join(nearest[:_MOST_NAMES]) + (", ..." if len(nearest) > _MOST_NAMES else "")
    ranks = _ranks_of(module)
    where = f"ranks {in_ranges(ranks)} hold" if len(ranks) > 1 else f"rank {ranks[0]} holds"
    could = f"could be checkpointed: {named}" if nearest else "none of its parts could be"
    path = path_of(module)
    return (
        f"{path} can't be checkpointed, as it is not placed as a whole: {where} its parts ({could})"
    )
