"""Tests of the settings and of where they come from."""

import copy
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from smp_runtime.config import ALIASES, NOT_YET, WITHOUT_MEANING, Config, load_config
from smp_runtime.errors import ConfigError, NotSupportedError


def environment(**settings: Any) -> dict[str, str]:
    return {"SM_HP_MP_PARAMETERS": json.dumps(settings)}


DEFAULTS = """{
    pipeline_parallel_degree: 1, microbatches: 1, active_microbatches: null,
    pipeline: interleaved, optimize: memory, memory_weight: 0.0, placement_strategy: cluster,
    auto_partition: true, default_partition: null,
    ddp: false, ddp_port: null, ddp_dist_backend: auto, deterministic_server: false,
    broadcast_inputs: true, debug: false, timeout: 600.0, seed: null, stages_per_rank: 1,
    tied_weights: auto, recompute_ahead: 1, recompute_ahead_modules: 1,
    emulate_clock: false, emulated_latency_us: 0.0, emulated_bandwidth_gbps: 0.0,
    tensor_parallel_degree: 1, tensor_parallel_seed: 0, prescaled_batch: false,
    shard_optimizer_state: false, overlap_parameter_gather: false, sharded_data_parallel_degree: 1,
    sdp_reduce_bucket_size: 500000000, sdp_param_persistence_threshold: 1000000,
    sdp_max_live_parameters: 1000000000, sdp_hierarchical_allgather: true,
    sdp_gradient_clipping: 1.0,
    offload_activations: false, activation_loading_horizon: 4, skip_tracing: false,
    fp16: false, bf16: false, fp32_grad_accumulation: true, fp16_params: false,
    delayed_parameter_initialization: false,
}"""


def test_defaults() -> None:
    assert load_config(None, {}).model_dump() == yaml.safe_load(DEFAULTS)


def test_every_default_may_be_written_down() -> None:
    assert Config(**Config().model_dump()) == Config()


def test_every_setting_is_described() -> None:
    assert [name for name, field in Config.model_fields.items() if not field.description] == []


def test_is_frozen_and_travels() -> None:
    config = Config(microbatches=4)
    with pytest.raises(ValueError, match="frozen"):
        config.microbatches = 5
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 1),
        ({"pipeline_parallel_degree": 4, "microbatches": 8}, 6),
        ({"pipeline_parallel_degree": 4, "microbatches": 3}, 3),
        ({"pipeline_parallel_degree": 4, "microbatches": 8, "active_microbatches": 2}, 2),
        ({"microbatches": 2, "active_microbatches": 5}, 2),
    ],
)
def test_active_microbatches_are_capped(settings: dict[str, int], expected: int) -> None:
    assert Config(**settings).resolved_active_microbatches == expected


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("pipeline_parallel_degree", [0, -1, 1.5, "2", True]),
        ("partitions", [0]),
        ("microbatches", [0, "4", [4]]),
        ("active_microbatches", [0]),
        ("pipeline", ["1f1b", "Simple", 1]),
        ("optimize", ["both"]),
        ("memory_weight", [-0.1, 1.1, float("nan"), "0.8", True]),
        ("placement_strategy", ["DP", "DPP", "cpt", "dpt"]),
        ("auto_partition", [2, "yes"]),
        ("default_partition", [-1, 0.5]),
        ("ddp", ["true"]),
        ("ddp_port", [0, 65536]),
        ("ddp_dist_backend", ["mpi"]),
        ("timeout", [0, -1, float("inf"), "60"]),
        ("seed", ["a", 1.5]),
        ("stages_per_rank", [0]),
        ("tied_weights", ["apart"]),
        ("emulated_latency_us", [-1]),
        ("emulated_bandwidth_gbps", [-1]),
        ("tensor_parallel_degree", [0]),
        ("sharded_data_parallel_degree", [-1]),
        ("sdp_gradient_clipping", [-1]),
        ("activation_loading_horizon", [0]),
    ],
)
def test_refuses_values_out_of_range(name: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(ConfigError) as caught:
            Config(**{name: value})
        name = name.replace("partitions", "pipeline_parallel_degree")
        assert str(caught.value).startswith(f"{name}={value!r}: ")


def test_an_error_says_what_to_write_instead() -> None:
    with pytest.raises(ConfigError) as caught:
        Config(pipeline="1f1b", microbatches=0)
    assert str(caught.value) == (
        "microbatches=0: it should be greater than or equal to 1. "
        "Number of equal microbatches that a step cuts its batch into.\n"
        "pipeline='1f1b': it should be 'interleaved' or 'simple'. "
        "The schedule: each backward as early as possible, or all forwards first."
    )


def test_takes_every_placement_strategy() -> None:
    for strategy in ("cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"):
        assert Config(placement_strategy=strategy).placement_strategy == strategy


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("microbatch", "microbatches"),
        ("Partitions", "partitions"),
        ("pipeline_degree", "pipeline_parallel_degree"),
        ("delay_param_initialization", "delayed_parameter_initialization"),
        (1, "fp16"),
    ],
)
def test_an_unknown_setting_is_told_its_nearest_name(key: object, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting {key!r}: .* is '{nearest}'$"):
        load_config({key: 1}, {})  # type: ignore[dict-item]


@given(st.text())
def test_any_other_name_is_unknown(key: str) -> None:
    if key not in {*Config.model_fields, *ALIASES, *WITHOUT_MEANING}:
        with pytest.raises(ConfigError, match="unknown setting"):
            load_config({key: 1}, {})


def test_partitions_is_an_alias() -> None:
    assert Config(partitions=4).pipeline_parallel_degree == 4
    assert Config(partitions=4, pipeline_parallel_degree=4).pipeline_parallel_degree == 4
    with pytest.raises(ConfigError, match="name one setting, but are 2 and 4: write pipeline_p"):
        Config(partitions=2, pipeline_parallel_degree=4)


def test_none_counts_as_not_given() -> None:
    assert Config(microbatches=None, partitions=None, pipeline_parallel_degree=2) == Config(
        pipeline_parallel_degree=2
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"auto_partition": False}, "needs default_partition"),
        ({"partitions": 2, "default_partition": 2}, "=2 does not exist: .* must be below 2"),
        (
            {"auto_partition": False, "default_partition": 0, "stages_per_rank": 2},
            "stages_per_rank is for the planner",
        ),
        ({"emulated_latency_us": 5}, "write emulate_clock=True"),
        ({"ddp_port": 7777}, "ddp_port=7777 without ddp: write ddp=True"),
        ({"overlap_parameter_gather": True}, "write shard_optimizer_state=True"),
        ({"tensor_parallel_degree": 2}, "write ddp=True"),
        ({"sharded_data_parallel_degree": 2}, "write ddp=True"),
        (
            {"ddp": True, "sharded_data_parallel_degree": 2, "partitions": 2},
            "write pipeline_parallel_degree=1",
        ),
        (
            {"ddp": True, "sharded_data_parallel_degree": 2, "shard_optimizer_state": True},
            "leave out shard_optimizer_state",
        ),
        (
            {"ddp": True, "sharded_data_parallel_degree": 2, "tensor_parallel_degree": 2},
            "need prescaled_batch=True",
        ),
        ({"fp16": True, "bf16": True}, "fp16 and bf16 exclude each other"),
    ],
)
def test_refuses_settings_in_conflict(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(**settings)


def test_settings_of_later_features_raise_until_they_work() -> None:
    assert set(Config.model_fields) > NOT_YET
    for name in NOT_YET:
        default = getattr(Config(), name)
        value = not default if isinstance(default, bool) else default + 1
        with pytest.raises(NotSupportedError, match=f"^{name}={value!r} is not supported yet"):
            Config(**{name: value, "ddp": True})


def test_what_tunes_a_feature_is_accepted_while_the_feature_is_off() -> None:
    config = Config(
        sdp_hierarchical_allgather=False,
        sdp_gradient_clipping=0.3,
        sdp_reduce_bucket_size=5e8,
        prescaled_batch=True,
        tensor_parallel_seed=7,
        fp16_params=True,
        skip_tracing=True,
        activation_loading_horizon=2,
        sharded_data_parallel_degree=0,
    )
    assert config.sharded_data_parallel_degree == 1
    assert config.prescaled_batch
    with pytest.warns(UserWarning, match="offload_activations=True has no effect yet"):
        assert Config(offload_activations=True).offload_activations


def test_one_and_zero_mean_yes_and_no() -> None:
    config = Config(ddp=1, auto_partition=0, default_partition=0)
    assert (config.ddp, config.auto_partition) == (True, False)


def test_forward_only_is_not_supported() -> None:
    with pytest.raises(NotSupportedError, match=r"torch\.no_grad"):
        Config(pipeline="_only_forward")


def test_keys_without_a_meaning_warn_once() -> None:
    old = {"horovod": True, "_match_weights": True, "contiguous": True, "fast_mode": False}
    with pytest.warns(UserWarning) as caught:
        assert load_config(old, environment(use_times=True)) == Config()
    (warning,) = caught
    assert str(warning.message).endswith("here: _match_weights=True, horovod=True, use_times=True")


def test_an_old_script_with_everything_at_its_default_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = load_config(
            {
                "ddp": True,
                "tensor_parallel_degree": 1,
                "pipeline_parallel_degree": 2,
                "microbatches": 4,
                "active_microbatches": None,
                "shard_optimizer_state": False,
                "prescaled_batch": False,
                "offload_activations": False,
                "optimize": "speed",
                "placement_strategy": "cluster",
                "activation_loading_horizon": 4,
                "skip_tracing": False,
                "auto_partition": True,
                "default_partition": 0,
                "static_mode": False,
                "fast_mode": False,
                "_match_weights": False,
                "_fp32_grad_accumulation": False,
            },
            environment(partitions=2, ddp=True, contiguous=True),
        )
    assert (config.pipeline_parallel_degree, config.memory_weight) == (2, 0.0)


def test_the_environment_wins() -> None:
    source = {"partitions": 4, "microbatches": 8, "pipeline": "simple"}
    config = load_config(source, environment(pipeline_parallel_degree=2, microbatches=None))
    assert config == Config(pipeline_parallel_degree=2, microbatches=8, pipeline="simple")
    assert source == {"partitions": 4, "microbatches": 8, "pipeline": "simple"}


@pytest.mark.parametrize("text", ["", "{}"])
def test_an_empty_environment_says_nothing(text: str) -> None:
    assert load_config(None, {"SM_HP_MP_PARAMETERS": text}) == Config()


@pytest.mark.parametrize("text", ["partitions=2", "[2]", "2"])
def test_refuses_an_environment_that_is_no_object(text: str) -> None:
    with pytest.raises(ConfigError, match="SM_HP_MP_PARAMETERS"):
        load_config(None, {"SM_HP_MP_PARAMETERS": text})


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.yaml", "# says what it shows\npartitions: 2\n", Config(partitions=2)),
        ("b.yml", "smp:\n  microbatches: 4\ntrain:\n  steps: 10\n", Config(microbatches=4)),
        ("c.json", '{"sdp_reduce_bucket_size": 5e8, "seed": 1}', Config(seed=1)),
        ("d.json", '{"smp": {"seed": 1}, "train": {}}', Config(seed=1)),
        ("e.yaml", "", Config()),
        ("f.yaml", "smp:\ntrain: {steps: 10}\n", Config()),
        ("g.yaml", "seed:\nactive_microbatches: null\nlayouts:\n", Config()),
    ],
)
def test_reads_files(tmp_path: Path, name: str, text: str, expected: Config) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert load_config(path, {}) == load_config(str(path), {}) == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "- microbatches\n", "must map settings to values"),
        ("b.yaml", "smp: 3\n", "must map settings to values"),
        ("c.yaml", "microbatches: [\n", "cannot understand the configuration .*c.yaml"),
        ("d.json", "{", "cannot understand the configuration .*d.json"),
        ("e.yaml", "train: {}\nmicrobatches: 2\n", "unknown setting 'train'"),
        ("f.yaml", "pipeline_parallel_degree: null\n", "f.yaml: pipeline_.* has no value: write"),
        ("g.json", '{"smp": {"partitions": null}}', "g.json: partitions has no value: write"),
    ],
)
def test_refuses_files(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path, {})


@pytest.mark.parametrize("source", [5, [1], 0, [], False, b"conf.yaml", [("microbatches", 4)]])
def test_refuses_what_is_no_configuration(source: Any) -> None:
    with pytest.raises(ConfigError, match=r"is no configuration: pass the settings as a dict") as e:
        load_config(source, {})
    assert str(e.value).startswith(repr(source))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot read .*nowhere.yaml: No such file"):
        load_config("nowhere.yaml", {})


@pytest.mark.parametrize(("num_ranks", "degree"), [("4", 4), ("2", 2), ("8", 4), (None, 4)])
def test_layouts_say_what_differs_for_a_number_of_ranks(num_ranks: str | None, degree: int) -> None:
    given = {"partitions": 4, "layouts": {2: {"partitions": 2}}}
    environ = {} if num_ranks is None else {"WORLD_SIZE": num_ranks}
    assert load_config(given, environ).pipeline_parallel_degree == degree


@pytest.mark.parametrize("layouts", [3, [2], {"two": {}}, {2: 3}])
def test_layouts_that_are_none(layouts: Any) -> None:
    with pytest.raises(ConfigError, match="layouts.*write the settings that differ"):
        load_config({"layouts": layouts}, {})
