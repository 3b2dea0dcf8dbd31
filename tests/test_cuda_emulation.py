"""`--emulate-cuda`: what a script says about CUDA means the CPU, in the launched process only."""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from launch import cuda_emulation
from launch.__main__ import job_environment, parse
from smp_runtime import device
from smp_runtime.config import Config, load_config
from tests.worlds import run_world


def emulated(body: Any) -> Any:
    """Runs a function in a process of its own, with emulated devices."""

    def run() -> Any:
        cuda_emulation.install()
        return body()

    return run_world(1, run)[0]


def test_tensors_and_modules_stay_on_the_cpu() -> None:
    def body() -> set[str]:
        cuda = torch.device("cuda", 0)
        linear = torch.nn.Linear(2, 2, device=cuda).to("cuda").cuda(0).to(cuda, torch.float32)
        moved = [
            torch.ones(2).cuda(),
            torch.ones(2).to(cuda, non_blocking=True),
            torch.ones(2).to(device="cuda:0"),
            torch.zeros(2, device=cuda).new_zeros(3, device="cuda"),
            torch.arange(3, device="cuda"),
            torch.tensor([1.0], device=cuda),
            torch.randn(2).pin_memory(),
            torch.cuda.FloatTensor([1.0]),
            torch.ones(1).type("torch.cuda.FloatTensor"),
            linear.weight,
        ]
        assert linear(moved[0]).sum().backward() is None
        return {str(tensor.device) for tensor in moved}

    assert emulated(body) == {"cpu"}


def test_the_usual_questions_have_answers() -> None:
    def body() -> list[Any]:
        torch.cuda.set_device(0)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.manual_seed_all(3)
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.nvtx.range_push("a")
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        held = torch.ones(1 << 22)
        end.record()
        free, total = torch.cuda.mem_get_info()
        with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0):
            torch.cuda.current_stream().synchronize()
        return [
            torch.cuda.is_available(),
            torch.cuda.device_count(),
            torch.cuda.current_device(),
            torch.cuda.is_bf16_supported(),
            torch.cuda.memory.memory_allocated() > 0,
            torch.equal(torch.cuda.random.get_rng_state(), torch.get_rng_state()),
            0 <= start.elapsed_time(end) < 10_000,
            held.nbytes < torch.cuda.memory_allocated() <= torch.cuda.max_memory_allocated(),
            torch.cuda.memory_stats()["allocated_bytes.all.current"] > held.nbytes,
            0 < free < total == torch.cuda.get_device_properties(0).total_memory,
        ]

    assert emulated(body) == [True, 1, 0, *[True] * 7]


def test_the_runtime_computes_on_the_cpu() -> None:
    def body() -> tuple[bool, str, str]:
        return device.has_accelerator(), str(device.current_device()), device.default_backend()

    assert emulated(body) == (False, "cpu", "gloo")


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="needs a torch without CUDA")
def test_a_torch_without_cuda_is_believed_rather_than_stand_ins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not device.has_accelerator()


@pytest.mark.parametrize("asked", ["torch.autocast", "torch.cuda.amp.autocast"])
def test_mixed_precision_is_the_cpus(asked: str) -> None:
    def body() -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if asked == "torch.autocast":
                context = torch.autocast("cuda", dtype=torch.bfloat16)
            else:
                context = torch.cuda.amp.autocast(True, torch.bfloat16)
            with context:
                product = torch.ones(2, 2) @ torch.ones(2, 2)
            scaler = torch.cuda.amp.GradScaler(init_scale=8.0)
            assert scaler.scale(torch.ones(1)).item() == 8.0
        return str(product.dtype)

    assert emulated(body) == "torch.bfloat16"


def test_a_file_made_on_cuda_is_read(tmp_path: Path) -> None:
    def body() -> str:
        torch.save(torch.ones(2), tmp_path / "x.pt")
        return str(torch.load(tmp_path / "x.pt", map_location="cuda:0").device)

    assert emulated(body) == "cpu"


def test_compiled_functions_still_find_torchs_own() -> None:
    def body() -> float:
        @torch.jit.script
        def f(x: torch.Tensor) -> torch.Tensor:
            return x + torch.ones(2)

        return float(f(torch.ones(2)).sum())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert emulated(body) == 4.0


def test_this_process_is_as_it_was() -> None:
    assert not hasattr(torch.cuda, "is_emulated")
    assert torch.zeros is torch._C._VariableFunctions.zeros


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import apex", "can't emulate apex, which consists of CUDA kernels"),
        ("raise RuntimeError('CUDA error: no kernel image')", "runs CUDA kernels itself can't be"),
    ],
)
def test_what_cannot_be_emulated_says_so(line: str, said: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(line)

    def body() -> list[str]:
        before = list(sys.path)
        try:
            cuda_emulation.main([str(script)])
        except Exception as error:
            return error.__notes__
        finally:
            sys.path[:] = before
        return []

    (note,) = run_world(1, body)[0]
    assert said in note


def test_scripts_of_smp_v1_get_their_settings_by_the_environment() -> None:
    config = Config(pipeline_parallel_degree=2, microbatches=4, ddp=True)
    plain = job_environment(config, is_sagemaker=False)
    assert load_config({"microbatches": 1}, plain) == config
    assert json.loads(plain["SM_HP_MP_PARAMETERS"])["partitions"] == 2  # transformers' gate
    assert set(plain) == {"SM_HP_MP_PARAMETERS"}
    params = json.loads(job_environment(config, is_sagemaker=True)["SM_FRAMEWORK_PARAMS"])
    assert params == {"sagemaker_mpi_enabled": True}


def test_the_flags_are_off_unless_asked_for() -> None:
    line = parse(["c.yaml", "s.py"], "launch")
    assert not (line.is_sagemaker or line.emulates_cuda)
    line = parse(["--emulate-cuda", "--sagemaker", "c.yaml", "s.py", "--config", "x"], "launch")
    assert line.is_sagemaker
    assert line.emulates_cuda
    assert line.arguments == ("--config", "x")


def test_a_script_for_cuda_is_launched_unmodified(tmp_path: Path) -> None:
    config, script = tmp_path / "config.yaml", tmp_path / "script.py"
    config.write_text("partitions: 2\n")
    script.write_text(
        "import sys, torch, helper\n"
        "import smdistributed.modelparallel.torch as smp\n"
        "smp.init()\n"
        "torch.cuda.set_device(smp.local_rank())\n"
        "print(smp.pp_size(), torch.cuda.current_device(), sys.argv[1:], helper.found)\n"
    )
    (tmp_path / "helper.py").write_text("found = 'beside the script'\n")
    command = ["-m", "launch", "--emulate-cuda", str(config), str(script), "--lr", "1"]
    said = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    assert "[rank 1] 2 1 ['--lr', '1'] beside the script" in said.stdout
    assert said.stderr.count("launch: emulating CUDA: this script computes on the CPU") == 1
