"""Unpickling that makes data and nothing else.

What ranks tell each other holds Python structure around tensors: containers, numbers, dataclasses,
the objects that models return. Pickle could also call any function by its name. Here it finds
classes only, of modules that this program has imported itself, and of the standard library and of
torch only those that hold data.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import NotSupportedError

_DATA: Mapping[str, tuple[str, ...]] = {
    "builtins": (
        *("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list"),
        *("object", "range", "set", "slice", "str", "tuple", "Ellipsis", "NotImplemented"),
    ),
    "argparse": ("Namespace",),
    "collections": ("Counter", "OrderedDict", "UserDict", "UserList", "defaultdict", "deque"),
    "copyreg": ("_reconstructor", "__newobj__", "__newobj_ex__"),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "pathlib": ("Path", "PosixPath", "PurePath", "PurePosixPath"),
    "types": ("SimpleNamespace",),
    "uuid": ("UUID",),
    "torch": ("Size", "device", "finfo", "iinfo"),
    "torch._utils": ("_rebuild_tensor_v2",),
    "torch.serialization": ("_get_layout",),
    "numpy.core.multiarray": ("scalar", "_reconstruct"),
    "numpy._core.multiarray": ("scalar", "_reconstruct"),
    "numpy.core.numeric": ("_frombuffer",),
    "numpy._core.numeric": ("_frombuffer",),
    "numpy": ("ndarray", "dtype"),
}
_CLOSED = frozenset({*sys.stdlib_module_names, "torch", "numpy"})
_TORCH_CONSTANTS = (torch.dtype, torch.layout)


class DataUnpickler(pickle.Unpickler):
    """Unpickles data; classes are looked up, functions are not.

    Raises:
        NotSupportedError: the bytes name something else.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Finds what a pickle names.

        Raises:
            NotSupportedError: it is no class of data, or of a module that is not imported.
        """
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_storage
        if name in _DATA.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), _TORCH_CONSTANTS):
            return getattr(torch, name)
        found: Any = sys.modules.get(module)
        if module.partition(".")[0] not in _CLOSED or module.startswith("numpy.dtypes"):
            for part in name.split("."):
                found = getattr(found, part, None)
            if isinstance(found, type):
                return found
        raise NotSupportedError(
            f"ranks send each other data only, but something that was sent names "
            f"{module}.{name}; return tensors, plain values and objects of your own classes from "
            "modules and steps, and no functions"
        )


def _load_storage(saved: bytes) -> Any:
    """Loads the data of a tensor; torch's own function would unpickle whatever is in there."""
    return torch.load(io.BytesIO(saved), weights_only=True)


def load_data(pickled: bytes | bytearray) -> Any:
    """Unpickles bytes that hold data.

    Raises:
        NotSupportedError: they name something else.
    """
    return DataUnpickler(io.BytesIO(pickled)).load()
