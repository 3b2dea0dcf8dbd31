"""What SageMaker's launcher adds to a script's command line."""

from __future__ import annotations

import logging
import os

from .config import ENVIRONMENT_VARIABLE

_log = logging.getLogger("smp_runtime")

_NAME = "--mp_parameters"


def drop_mp_parameters(arguments: list[str]) -> None:
    """Takes ``--mp_parameters k=v,...`` out of a command line that the script has yet to parse.

    SageMaker gives the settings twice, there and in the environment, which counts. Parsers that
    refuse unknown options, as that of transformers 5, would stop at it.

    Args:
        arguments: the command line, changed in place.
    """
    for place, argument in enumerate(arguments):
        if argument == _NAME or argument.startswith(f"{_NAME}="):
            del arguments[place : place + (2 if argument == _NAME else 1)]
            break
    else:
        return
    if not os.environ.get(ENVIRONMENT_VARIABLE):
        _log.warning(
            "%s on the command line is ignored: settings come from smp.init and from the "
            "environment variable %s",
            _NAME,
            ENVIRONMENT_VARIABLE,
        )
