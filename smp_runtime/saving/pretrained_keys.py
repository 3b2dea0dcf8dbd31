"""Which tensors of a Hugging Face folder make which parameter, and the other way round.

Most have the same name. transformers renames some, and joins or splits others (the experts of a
mixture): its own rules are used, one group of tensors at a time, so that nobody needs them all.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

Read = Callable[[str], Tensor]


@dataclass
class Group:
    """Tensors that are converted together.

    Attributes:
        name: the first name that comes out.
        converter: transformers' rule; None where the one tensor stays as it is.
        renamings: more rules, for the names that come out of `converter`.
        keys: the tensors that go in, and which pattern of the rule each one matches.
    """

    name: str
    converter: Any = None
    renamings: Sequence[Any] = ()
    keys: list[tuple[str, str]] = field(default_factory=list)

    def convert(self, module: nn.Module, read: Read) -> dict[str, Tensor]:
        """Returns what comes out, by name.

        Args:
            module: the user's model.
            read: returns a tensor that goes in.
        """
        if self.converter is None:
            return {self.name: read(self.keys[0][0])}
        converter = copy.deepcopy(self.converter)
        for key, pattern in self.keys:
            converter.add_tensor(self.name, key, pattern, read(key))
        made = converter.convert(self.name, model=module, config=module.config)
        return {
            _renamed(name, self.renamings): value[0] if isinstance(value, list) else value
            for name, value in made.items()
        }

    def names(self) -> list[str]:
        """Returns the names that come out."""
        if self.converter is None:
            return [self.name]
        first, *others = self.converter.target_patterns
        return [self.name, *(self.name.replace(first, other) for other in others)]


def loading_groups(module: nn.Module, keys: Iterable[str]) -> dict[str, Group]:
    """Returns for each parameter and buffer the group of tensors of a folder that makes it.

    Args:
        module: the user's model.
        keys: the names of the tensors in the folder. One that makes nothing is its own group.
    """
    expected = dict.fromkeys(module.state_dict(), True)
    rules = _rules(module, is_loading=True)
    if rules is None:
        return {key: Group(key, keys=[(key, key)]) for key in keys}
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    renamings, converters = rules
    prefix: Any = module.base_model_prefix
    groups: dict[str, Group] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
        if name not in expected and key in expected:
            name, pattern = key, None
        group = groups.setdefault(name, Group(name, _rule_of(pattern, converters)))
        group.keys.append((key, pattern or key))
    return {name: group for group in groups.values() for name in group.names()}


def saving_groups(module: nn.Module, entries: Mapping[str, Any]) -> list[Group]:
    """Returns how a folder's tensors come from parameters and buffers, as transformers saves them.

    Args:
        module: the user's model.
        entries: its state dict. Of several names of one tensor the one is kept that transformers
            keeps.
    """
    rules = _rules(module, is_loading=False)
    if rules is None:
        first: dict[int, str] = {}
        for name, entry in entries.items():
            first.setdefault(id(entry), name)
        return [Group(name, keys=[(name, name)]) for name in first.values()]
    from transformers.core_model_loading import apply_converters, apply_renamings, dot_natural_key
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    model: Any = module
    ignored = set(model._keys_to_ignore_on_save or ())
    # Names are chosen by looking at what shares memory: small tensors in the place of large ones.
    small: dict[int, Tensor] = {}
    proxies = {
        name: small.setdefault(id(entry), torch.empty(1))
        for name, entry in entries.items()
        if name not in ignored
    }
    renamings, converters = rules
    groups: dict[str, Group] = {}
    names = remove_tied_weights_from_state_dict(proxies, model)
    for key in sorted(names, key=dot_natural_key):
        name, pattern = apply_converters(key, converters)
        if pattern is None:
            name = apply_renamings(key, renamings)
        rule = _rule_of(pattern, converters)
        group = groups.setdefault(name, Group(name, rule, renamings))
        group.keys.append((key, pattern or key))
    return list(groups.values())


def _rules(module: nn.Module, *, is_loading: bool) -> tuple[list[Any], list[Any]] | None:
    """Returns transformers' rules for renaming and for converting; None for other models.

    transformers 4 has none either: its files have the names of its models.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return None
    if find_spec("transformers.conversion_mapping") is None:
        return None
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming

    model: Any = module
    rules: list[Any] | None = getattr(model, "_weight_conversions", None)
    if rules is None:
        rules = get_model_conversion_mapping(model, add_legacy=is_loading)
        if is_loading:
            model._weight_conversions = rules
        else:  # whether there was a prefix is not known of a model that was not loaded
            rules = [rule for rule in rules if not isinstance(rule, PrefixChange)]
    if not is_loading:
        rules = [rule.reverse_transform() for rule in reversed(rules)]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    return renamings, [rule for rule in rules if isinstance(rule, WeightConverter)]


def _rule_of(pattern: str | None, converters: Sequence[Any]) -> Any:
    """Returns the rule that has a pattern."""
    return next((rule for rule in converters if pattern in rule.source_patterns), None)


def _renamed(name: str, renamings: Sequence[Any]) -> str:
    for rule in renamings:
        name, _ = rule.rename_source_key(name)
    return name
