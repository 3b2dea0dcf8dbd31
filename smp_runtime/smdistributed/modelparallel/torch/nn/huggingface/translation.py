"""What the families share: state dicts need no translation where layers are not replaced."""

from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from smp_runtime.errors import NotSupportedError

_StateDict = TypeVar("_StateDict", bound=Mapping[str, Any])


def to_hf(state_dict: _StateDict, max_seq_len: int | None = None) -> _StateDict:
    """Returns the state dict as it is: it has the names of the Hugging Face model.

    Args:
        state_dict: of the whole model.
        max_seq_len: without effect; buffers of masks are the model's own.
    """
    return state_dict


def from_hf(state_dict: _StateDict, max_seq_len: int | None = None) -> _StateDict:
    """Returns the state dict as it is: the model has the names of the Hugging Face model.

    Args:
        state_dict: of the whole model.
        max_seq_len: without effect; buffers of masks are the model's own.
    """
    return state_dict


def layer_hook(*args: Any, **kwargs: Any) -> NoReturn:
    """Would translate the arguments of a layer for its distributed form.

    Raises:
        NotSupportedError: always. Nothing calls it at tensor degree 1.
    """
    raise NotSupportedError("distributed transformer layers are not supported yet")
