"""The configuration: every setting, its meaning, its range, and where settings come from.

Keys are spelled as SMP v1 spells them. Where its documents, its logs and its clients contradict
each other, this is what holds here:

* `pipeline_parallel_degree` and `partitions` are one setting. Given twice with different values
  in one place it is an error; the default is 1.
* `active_microbatches` is by default `pipeline_parallel_degree` + 2, and never more than
  `microbatches`.
* `memory_weight` is 0 by default: the smallest slowest rank, as long as memory suffices. SMP's
  documents say 0.2 or 0.8, its logs 0.8; there it decides between costs of another kind.
* `default_partition` has no default. Modules that nobody placed are then the planner's, and with
  `auto_partition` off there is no planner, so it must be given.
* `placement_strategy` takes every permutation of the letters D, P and T. `cluster` is DPT.
* `delayed_parameter_initialization` is the key; similar names are those of functions.
* A setting given as None counts as not given: scripts pass the defaults of their own options on.

* What only tunes a feature is accepted with any value while the feature is off: the settings of
  sharded data parallelism at `sharded_data_parallel_degree` 1 (or 0, which some scripts pass),
  `prescaled_batch`, `tensor_parallel_seed` and `fp16_params` at `tensor_parallel_degree` 1.
* `skip_tracing` changes nothing: the trace runs on fake tensors, so no model is too big for it.
* `offload_activations` is accepted with a warning: activations stay where they are.
* Yes or no may be written as 1 or 0, as scripts do that pass options of type int on.

Settings of features that do not exist yet are accepted at their default, which changes nothing.
"""

import difflib
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, ValidationError

from .errors import ConfigError, NotSupportedError

ENVIRONMENT_VARIABLE = "SM_HP_MP_PARAMETERS"
ALIASES = {
    "partitions": "pipeline_parallel_degree",
    "_fp32_grad_accumulation": "fp32_grad_accumulation",
}

LAYOUTS = "layouts"
_LAYOUTS_ADVICE = (
    "write the settings that differ, for each number of ranks, like "
    "`layouts: {2: {pipeline_parallel_degree: 2}}`"
)

# Keys of old scripts that mean nothing here, with the value that asks for nothing.
WITHOUT_MEANING: Mapping[str, object] = {
    **{"contiguous": True, "horovod": False},  # TensorFlow only
    **{"load_partition": False, "partition_file": "", "overlapping_allreduce": False},
    **{"static_mode": False, "fast_mode": False, "use_times": False},
    **{"checkpoint_attentions": False, "_match_weights": False},
    **{"_prescaled_batch": False},
}

# A feature that starts to work leaves this set.
NOT_YET = frozenset(
    {
        "sharded_data_parallel_degree",
        "tensor_parallel_degree",
    }
)


def _whole(value: object) -> object:
    """Lets ``5e8`` pass for a whole number, as JSON and Python read it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _yes_or_no(value: object) -> object:
    """Lets 1 and 0 pass for yes and no."""
    return bool(value) if type(value) is int and value in (0, 1) else value


def _off(value: object) -> object:
    """Lets degree 0 pass for a feature that is off."""
    return 1 if type(value) is int and value == 0 else value


Source = Mapping[str, Any] | str | Path | None
Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Whole, Field(ge=1)]
Flag = Annotated[bool, BeforeValidator(_yes_or_no)]
Strategy = Literal["cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"]


class Config(BaseModel):
    """The settings of one job. Equal on all ranks and never changed."""

    model_config = ConfigDict(frozen=True, strict=True, use_attribute_docstrings=True)

    pipeline_parallel_degree: Count = 1
    """Number of partitions of the model. `partitions` is another name for it."""
    microbatches: Count = 1
    """Number of equal microbatches that a step cuts its batch into."""
    active_microbatches: Count | None = None
    """Most microbatches in flight at once; less needs less memory, and makes longer bubbles."""
    pipeline: Literal["interleaved", "simple"] = "interleaved"
    """The schedule: each backward as early as possible, or all forwards first."""
    optimize: Literal["memory", "speed"] = "memory"
    """How tensor parallelism cuts its layers. No effect at tensor degree 1."""
    memory_weight: float = Field(0.0, ge=0, le=1)
    """What the partitioning balances: 1 only memory, 0 only compute."""
    placement_strategy: Strategy = "cluster"
    """Layout of ranks: D data, P pipeline, T tensor, from the slowest varying to the fastest."""
    auto_partition: Flag = True
    """Whether modules that were not placed by hand are placed by the planner."""
    default_partition: Annotated[Whole, Field(ge=0)] | None = None
    """Partition of modules that were not placed by hand, where `auto_partition` is off."""
    ddp: Flag = False
    """Whether there is data parallelism: needed for more ranks than one replica has."""
    ddp_port: Annotated[Whole, Field(ge=1, le=65535)] | None = None
    """Port where ranks meet, in place of MASTER_PORT."""
    ddp_dist_backend: Literal["auto", "nccl"] = "auto"
    """Backend of collectives. Either value means the one that fits the device."""
    deterministic_server: Flag = False
    """Whether all replicas work in the same order. They do in any case."""

    broadcast_inputs: Flag = True
    """Whether a step's arguments come from pipeline rank 0. Off: each rank brings equal ones."""
    debug: Flag = False
    """Whether to check at every step what ranks otherwise trust each other with."""
    timeout: FiniteFloat = Field(600.0, gt=0)
    """Seconds that any wait for another rank may take."""
    seed: Whole | None = None
    """Seed of all random streams. None: pipeline rank 0's `torch.initial_seed()` at first use."""
    stages_per_rank: Count = 1
    """Number of stages that the planner gives to each rank. Above 1 the pipeline is looped."""
    tied_weights: Literal["auto", "together", "copy"] = "auto"
    """Whether users of a shared parameter live on one rank or each hold a copy. Auto: cheaper."""
    recompute_ahead: Annotated[Whole, Field(ge=0)] = 1
    """Microbatches that an idle rank may recompute before their output gradients have come."""
    recompute_ahead_modules: Count = 1
    """Checkpointed modules of each that are recomputed ahead, from the last; all hold memory."""
    emulate_clock: Flag = False
    """Whether steps are timed by a clock on which each rank has a core of its own."""
    emulated_latency_us: FiniteFloat = Field(0.0, ge=0)
    """Microseconds that any message takes on the emulated clock."""
    emulated_bandwidth_gbps: FiniteFloat = Field(0.0, ge=0)
    """Gigabits a second of a link on the emulated clock. 0: unlimited."""

    tensor_parallel_degree: Count = 1
    """Number of ranks that share each layer."""
    tensor_parallel_seed: Whole = 0
    """Seed of the weights that differ between tensor ranks."""
    prescaled_batch: Flag = False
    """Whether all tensor ranks of a group are given the same batch."""
    shard_optimizer_state: Flag = False
    """Whether optimizer state is sharded over the ranks that hold the same parameter."""
    overlap_parameter_gather: Flag = False
    """Whether `shard_optimizer_state` gathers parameters during the next forward."""
    sharded_data_parallel_degree: Annotated[Count, BeforeValidator(_off)] = 1
    """Number of ranks over which parameters, gradients and optimizer state are sharded."""
    sdp_reduce_bucket_size: Count = 500_000_000
    """Elements of a gradient bucket of sharded data parallelism."""
    sdp_param_persistence_threshold: Annotated[Whole, Field(ge=0)] = 1_000_000
    """Elements below which a parameter is not sharded."""
    sdp_max_live_parameters: Count = 1_000_000_000
    """Most elements of parameters that are gathered at once."""
    sdp_hierarchical_allgather: Flag = True
    """Whether parameters are gathered within nodes first."""
    sdp_gradient_clipping: float = Field(1.0, ge=0)
    """Norm to which sharded data parallelism clips gradients."""
    offload_activations: Flag = False
    """Whether checkpointed activations wait in CPU memory. No effect yet."""
    activation_loading_horizon: Count = 4
    """How many actions ahead offloaded activations are brought back. No effect yet."""
    skip_tracing: Flag = False
    """Whether the model is partitioned without a trace. No effect: a trace needs no memory."""
    fp16: Flag = False
    """Whether to train in float16, with float32 master weights and a scaled loss."""
    bf16: Flag = False
    """Whether to train in bfloat16, with float32 master weights."""
    fp32_grad_accumulation: Flag = True
    """Whether gradients of 16-bit parameters add up in float32, with `fp16` or `bf16`; needs torch
    2.10 or newer."""
    fp16_params: Flag = False
    """Whether layers of tensor parallelism begin in float16. SMP itself replaced it by `fp16`."""
    delayed_parameter_initialization: Flag = False
    """Whether `smp.model_creation` makes parameters after the partitioning. It does in any case."""

    def __init__(self, **settings: Any) -> None:
        settings = _without_meaningless(_named_once(settings))
        if settings.get("pipeline") == "_only_forward":
            raise NotSupportedError(
                "pipeline='_only_forward' is not supported: call the step under torch.no_grad() "
                "and leave out model.backward()"
            )
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ConfigError("\n".join(_explain(error))) from None
        if conflicts := list(_conflicts(self)):
            raise ConfigError("\n".join(conflicts))
        for name in sorted(NOT_YET):
            default = type(self).model_fields[name].default
            if getattr(self, name) != default:
                raise NotSupportedError(
                    f"{name}={settings[name]!r} is not supported yet: leave it at {default!r}"
                )
        if self.offload_activations:
            warnings.warn("offload_activations=True has no effect yet", stacklevel=2)

    @property
    def resolved_active_microbatches(self) -> int:
        """The most microbatches in flight at once, with the default filled in."""
        degree = self.pipeline_parallel_degree
        # A looped pipeline needs more in flight to fill: each rank has several stages.
        default = max(degree + 2, 2 * degree) if self.stages_per_rank > 1 else degree + 2
        wish = self.active_microbatches or default
        return min(wish, self.microbatches)


def load_config(source: Source, environ: Mapping[str, str]) -> Config:
    """Returns the configuration of a job.

    Args:
        source: settings, or the path of a YAML or JSON file that holds them, at its top or under
            the key `smp` beside sections of others; None for no settings.
        environ: environment variables. Settings in SM_HP_MP_PARAMETERS, a JSON object, win over
            those of `source`. WORLD_SIZE, the number of ranks, picks one of `layouts` if there
            are any: the settings of `source` that differ for that number.

    Raises:
        ConfigError: a setting is unknown, out of range, or in conflict with another one.
        NotSupportedError: a setting asks for a feature that does not exist yet.
    """
    given = _given(source)
    try:
        override = json.loads(environ.get(ENVIRONMENT_VARIABLE) or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{ENVIRONMENT_VARIABLE} does not hold JSON: {error}") from None
    if not isinstance(override, dict):
        raise ConfigError(f"{ENVIRONMENT_VARIABLE} must hold a JSON object, not {override!r}")
    given = _for_layout(given, environ.get("WORLD_SIZE"))
    return Config(**_named_once(given) | _named_once(override))


def _given(source: Source) -> dict[str, Any]:
    """Returns the settings that a script gives, in whatever form."""
    if isinstance(source, str | Path):
        return _read(Path(source))
    if source is None or isinstance(source, Mapping):
        return dict(source or {})
    raise ConfigError(
        f"{source!r} is no configuration: pass the settings as a dict, like "
        '{"microbatches": 4}, the path of a YAML or JSON file, or nothing'
    )


def _for_layout(given: dict[str, Any], num_ranks: str | None) -> dict[str, Any]:
    """Returns the settings for this number of ranks; `layouts` says what differs from the rest."""
    rest = {key: value for key, value in given.items() if key != LAYOUTS}
    layouts = given.get(LAYOUTS) or {}
    if not isinstance(layouts, Mapping):
        raise ConfigError(f"{LAYOUTS}={layouts!r}: {_LAYOUTS_ADVICE}")
    for size, settings in layouts.items():
        if not (str(size).isdecimal() and isinstance(settings, Mapping)):
            raise ConfigError(f"{LAYOUTS}: {size!r}: {settings!r}: {_LAYOUTS_ADVICE}")
    chosen = {str(size): settings for size, settings in layouts.items()}.get(num_ranks or "", {})
    return {**rest, **chosen}


def _read(path: Path) -> dict[str, Any]:
    """Returns the settings that a file holds."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot understand the configuration {path}: {error}") from None
    if isinstance(content, dict) and "smp" in content:
        content = content["smp"]
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{path} must map settings to values, like `microbatches: 4`")
    for key, value in (content or {}).items():
        if value is None and not _may_be_none(key):
            raise ConfigError(f"{path}: {key} has no value: write one, or leave the line out")
    return content or {}


def _may_be_none(key: Any) -> bool:
    """Says whether a file may leave a key without a value.

    In a script None is what an option holds that nobody gave; a file has no such options.
    """
    field = Config.model_fields.get(ALIASES.get(key, key))
    return field is None or field.default is None


def _named_once(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that say something, each under its one name."""
    named: dict[str, Any] = {}
    for key, value in settings.items():
        name = ALIASES.get(key, key)
        if value is None:
            continue
        if name not in Config.model_fields and name not in WITHOUT_MEANING:
            known = [*Config.model_fields, *ALIASES]
            nearest = difflib.get_close_matches(str(key).lower(), known, n=1, cutoff=0)[0]
            raise ConfigError(f"unknown setting {key!r}: the nearest known one is {nearest!r}")
        if name in named and named[name] != value:
            raise ConfigError(
                f"{_alias_of(name)} and {name} name one setting, but are {named[name]!r} "
                f"and {value!r}: write {name} only"
            )
        named[name] = value
    return named


def _alias_of(name: str) -> str:
    return next(alias for alias, known in ALIASES.items() if known == name)


def _without_meaningless(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that mean something, and warns once of the others that ask for more."""
    legacy = settings.keys() & WITHOUT_MEANING.keys()
    ignored = [f"{k}={settings[k]!r}" for k in legacy if settings[k] != WITHOUT_MEANING[k]]
    if ignored:
        text = ", ".join(sorted(ignored))
        warnings.warn(f"settings without a meaning here: {text}", stacklevel=3)
    return {name: settings[name] for name in settings.keys() - legacy}


def _explain(error: ValidationError) -> Iterator[str]:
    """Says of each wrong value what would be right, and what the setting means."""
    for detail in error.errors():
        name = str(detail["loc"][0])
        reason = detail["msg"].replace("Input should", "it should")
        yield f"{name}={detail['input']!r}: {reason}. {Config.model_fields[name].description}"


def _conflicts(config: Config) -> Iterator[str]:
    """Says of each pair of settings that exclude each other which to change."""
    degree, home = config.pipeline_parallel_degree, config.default_partition
    sharded = config.sharded_data_parallel_degree > 1
    tensor = config.tensor_parallel_degree > 1
    if home is None and not config.auto_partition:
        yield "auto_partition=False needs default_partition: write the partition of the rest"
    if home is not None and home >= degree:
        yield (
            f"default_partition={home} does not exist: with pipeline_parallel_degree={degree} "
            f"it must be below {degree}"
        )
    if config.stages_per_rank > 1 and not config.auto_partition:
        yield "stages_per_rank is for the planner: leave it out or write auto_partition=True"
    if not config.emulate_clock and (config.emulated_latency_us or config.emulated_bandwidth_gbps):
        yield "an emulated link needs an emulated clock: write emulate_clock=True as well"
    if config.ddp_port is not None and not config.ddp:
        yield f"ddp_port={config.ddp_port} without ddp: write ddp=True as well"
    if (tensor or sharded) and not config.ddp:
        yield "tensor and sharded data parallelism need ddp: write ddp=True as well"
    if sharded and degree > 1:
        yield "sharded data parallelism excludes pipelines: write pipeline_parallel_degree=1"
    if sharded and config.shard_optimizer_state:
        yield "sharded data parallelism shards optimizer state: leave out shard_optimizer_state"
    if config.overlap_parameter_gather and not config.shard_optimizer_state:
        yield "overlap_parameter_gather needs sharded state: write shard_optimizer_state=True"
    if sharded and tensor and not config.prescaled_batch:
        yield "sharded data and tensor parallelism together need prescaled_batch=True"
    if config.fp16 and config.bf16:
        yield "fp16 and bf16 exclude each other: write one"
