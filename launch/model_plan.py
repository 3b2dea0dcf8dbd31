"""A model's partition and the memory of each rank, from the shapes alone: no weights, no ranks."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from smp_runtime.config import Config
from smp_runtime.errors import ConfigError
from smp_runtime.optimization.precision import Precision
from smp_runtime.planning.partitioning import Partition, partition
from smp_runtime.tracing.trace import trace_model

from .overview import chain_plan


def model_plan(config: Config, model_name: str, sequence_length: int, batch: int | None) -> str:
    """Returns the partition assignments and what each rank holds, as a text.

    Args:
        config: of the run.
        model_name: a name on the hub, a local folder, or the path of a `config.json`.
        sequence_length: tokens of a sample.
        batch: samples of a step, None for one in each microbatch.
    """
    if not model_name:
        raise ConfigError("--plan divides a model: write --model with its name, folder or JSON")
    samples = microbatch_size(config, batch)
    model = meta_model(model_name)
    planned = model_partition(config, model, samples, sequence_length)
    return "\n".join(
        (
            f"{type(model).__name__} on {config.pipeline_parallel_degree} partitions, "
            f"{config.microbatches} microbatches of {samples} x {sequence_length} tokens",
            "Partition assignments:",
            planned.table(),
        )
    )


def microbatch_size(config: Config, batch: int | None) -> int:
    """Returns the number of samples in a microbatch."""
    samples, rest = divmod(batch or config.microbatches, config.microbatches)
    if rest:
        raise ConfigError(
            f"a batch of {batch} cannot be cut into {config.microbatches} equal microbatches: "
            f"write --batch {(samples + 1) * config.microbatches}"
        )
    return samples


def meta_model(name: str) -> PreTrainedModel:
    """Builds a causal language model without memory for its weights."""
    path = Path(name)
    try:
        shape: PretrainedConfig = AutoConfig.from_pretrained(path if path.exists() else name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the shape of the model {name!r}: {error}") from error
    build: Any = AutoModelForCausalLM.from_config  # transformers gives it no types
    with torch.device("meta"):
        model: PreTrainedModel = build(shape)
    model.train()
    return model


def model_partition(
    config: Config, model: PreTrainedModel, samples: int, sequence_length: int
) -> Partition:
    """Traces a model with one microbatch of token ids that are their own labels."""
    precision = Precision(config)
    precision.convert(model)
    precision.prepare_gradients(model.parameters())
    tokens = torch.zeros(samples, sequence_length, dtype=torch.long, device="meta")
    trace = trace_model(model, (), {"input_ids": tokens, "labels": tokens})
    return partition(
        trace.root,
        config.pipeline_parallel_degree,
        stages_per_rank=config.stages_per_rank,
        memory_weight=config.memory_weight,
        tied=config.tied_weights,
        num_in_flight=chain_plan(config).peak_stashed,
        default_partition=None if config.auto_partition else config.default_partition,
    )
