"""`DistributedModel`: the user's model, of which each rank holds a part."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp_runtime as smp
from smp_runtime.errors import NotSupportedError, UsageError
from tests.transparency import copies
from tests.worlds import run_world, run_world_expecting_failure

WIDTH = 4


class Model(nn.Module):
    """A few layers, a buffer, a tied head and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": WIDTH}
        self.embedding = nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        h = self.embedding(tokens)
        for block in self.blocks:
            h = torch.tanh(block(h))
        return self.head(self.dropout(self.norm(h))) * scale


TOKENS = torch.arange(8) % 5


def build(seed: int = 1) -> Model:
    torch.manual_seed(seed)
    return Model()


def start(**config: Any) -> Any:
    size = torch.distributed.get_world_size()
    smp.init({"pipeline_parallel_degree": size, "microbatches": 2, "timeout": 20.0, **config})
    return smp.DistributedModel(build())


@smp.step
def train(model: Any, tokens: Tensor) -> Tensor:
    loss = model(tokens).square().mean()
    model.backward(loss)
    return loss


@smp.step
def evaluate(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens)


def test_it_needs_a_runtime() -> None:
    with pytest.raises(UsageError, match=r"smp\.init\(\)"):
        smp.DistributedModel(nn.Linear(1, 1))


@pytest.mark.world
@pytest.mark.parametrize("size", [1, 2])
def test_what_is_asked_at_the_wrong_time_or_not_supported_raises(size: int) -> None:
    def body() -> str:
        smp.init({"pipeline_parallel_degree": size})
        with pytest.raises(UsageError, match=r"backward_passes_per_step=0.*must be positive"):
            smp.DistributedModel(build(), backward_passes_per_step=0)
        model = smp.DistributedModel(build())
        with pytest.raises(UsageError, match="was called before; a script has one model"):
            smp.DistributedModel(build())
        if size > 1:
            with pytest.raises(UsageError, match=r"only be called inside a function.*@smp\.step"):
                model(TOKENS)
        else:
            assert model(TOKENS).shape == (8, 8)
        with pytest.raises(UsageError, match=r"model\.backward can only be called inside"):
            model.backward(torch.zeros((), requires_grad=True))
        for option in ("retain_graph", "create_graph"):
            with pytest.raises(NotSupportedError, match="retain_graph"):
                model.backward(torch.zeros(()), **{option: True})
        return "raised"

    assert run_world(size, body) == ["raised"] * size


@pytest.mark.world
@pytest.mark.parametrize("size", [1, 2])
def test_names_and_parts(size: int) -> None:
    def body() -> Any:
        model = start()
        before = [name for name, _ in model.local_named_parameters()]
        assert before == [name for name, _ in build().named_parameters()]
        assert model.partitioned is (size == 1)
        train(model, TOKENS)
        assert model.partitioned
        assert model.config == {"width": WIDTH}
        assert type(model.get_module()).__name__ == "Model"
        assert isinstance(model.get_module().blocks[0], nn.Linear)
        assert model.state_dict().keys() == build().state_dict().keys()
        for name, parameter in model.named_parameters():
            is_here = name in dict(model.local_named_parameters())
            assert parameter.is_meta is not is_here, name
        assert len(list(model.local_modules())) == len(list(model.local_named_modules()))
        return (
            [name for name, _ in model.local_named_parameters()],
            [name for name, _ in model.local_named_buffers()],
            [name for name, module in model.local_named_modules() if isinstance(module, nn.Linear)],
            [tuple(parameter.shape) for parameter in model.local_parameters()],
            len(list(model.local_buffers())),
        )

    results = run_world(size, body)
    plain = build()
    names = dict(plain.named_parameters())
    for parameters, buffers, _, shapes, num_buffers in results:
        assert shapes == [tuple(names[name].shape) for name in parameters]
        assert len(buffers) == num_buffers
    assert {name for result in results for name in result[0]} == set(names)
    assert sorted(name for result in results for name in result[1]) == sorted(
        name for name, _ in plain.named_buffers()
    )
    linear = {name for name, module in plain.named_modules() if isinstance(module, nn.Linear)}
    assert {name for result in results for name in result[2]} == linear


@pytest.mark.world
@pytest.mark.parametrize("size", [1, 2])
def test_hooks_are_called_once_partitioned_and_after_each_step(size: int) -> None:
    def body() -> Any:
        model = start()
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        called: list[str] = []

        def note(name: str) -> Any:
            def hook(given: Any, other: Any) -> None:
                assert given is model
                assert other is optimizer
                called.append(name)

            return hook

        model.register_post_partition_hook(note("partitioned"))
        model.register_post_step_hook(note("stepped"))
        handle = model.register_post_step_hook(note("removed"))
        handle.remove()
        train(model, TOKENS)
        evaluate(model, TOKENS)
        model.register_post_step_hook(note("stepped again"))
        train(model, TOKENS)
        return called

    assert run_world(size, body) == [["partitioned", "stepped", "stepped again"]] * size


@pytest.mark.world
@pytest.mark.parametrize("size", [1, 2])
def test_modes_reach_every_rank(size: int) -> None:
    def body() -> Any:
        model = start()
        model.eval()
        first = evaluate(model, TOKENS).concat()
        again = evaluate(model, TOKENS).concat()
        assert torch.equal(first, again)
        assert not any(module.training for module in model.get_module().modules())
        model.train()
        assert all(module.training for module in model.get_module().modules())
        assert not torch.equal(evaluate(model, TOKENS).concat(), first)
        return first

    plain = build().eval()
    for found in run_world(size, body):
        torch.testing.assert_close(found, plain(TOKENS).detach())


@pytest.mark.world
def test_the_trace_is_told_from_running_and_leaves_the_model_as_it_was() -> None:
    class Watched(Model):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[bool, bool]] = []

        def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
            flags.append(smp.is_tracing())
            return super().forward(tokens, scale)

    flags: list[bool] = []

    def body() -> Any:
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
        torch.manual_seed(1)
        model = smp.DistributedModel(Watched())
        model.eval()
        evaluate(model, TOKENS)
        assert not smp.is_tracing()
        assert not model.get_module().training
        counts = [
            buffer.item()
            for name, buffer in model.local_named_buffers()
            if name.endswith("num_batches_tracked")
        ]
        return flags, counts

    first, second = run_world(2, body)
    assert first[0].count(False) == second[0].count(False) == 2
    assert first[0].count(True) >= 1
    assert second[0].count(True) == 0
    assert first[1] + second[1] == [0]


@pytest.mark.world
@pytest.mark.parametrize("tied", ["copy", "together"])
def test_state_goes_round_between_degrees(tied: str) -> None:
    def body() -> Any:
        model = start(tied_weights=tied)
        train(model, TOKENS)
        whole = copies(model.state_dict().items())
        on_first = model.state_dict(gather_to_rank0=True)
        local = model.local_state_dict()
        assert local.pop("_smp_is_partial") is True
        local = copies(local.items())
        for key, entry in local.items():
            assert torch.equal(entry, whole[key]), key
        saved = io.BytesIO()
        torch.save(whole, saved)
        with torch.no_grad():
            for parameter in model.local_parameters():
                parameter.zero_()
        result = model.load_state_dict(whole)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        again = model.state_dict()
        assert all(torch.equal(again[key], whole[key]) for key in whole)
        with torch.no_grad():
            for parameter in model.local_parameters():
                parameter.zero_()
        model.load_state_dict({**local, "_smp_is_partial": True}, same_partition_load=True)
        again = model.state_dict()
        assert all(torch.equal(again[key], whole[key]) for key in whole)
        with pytest.raises(RuntimeError, match="unexpected keys: other"):
            model.load_state_dict({**whole, "other": torch.zeros(1)})
        return saved.getvalue(), sorted(on_first), sorted(local)

    first, second = run_world(2, body)
    states = [torch.load(io.BytesIO(saved)) for saved, *_ in (first, second)]
    names = list(build().state_dict())
    assert [list(state) for state in states] == [names, names]
    assert all(torch.equal(states[0][name], states[1][name]) for name in names)
    assert first[1] == sorted(names)
    assert second[1] == []
    assert set(first[2]) | set(second[2]) == set(names)
    plain = build()
    plain.load_state_dict(states[0])
    assert torch.equal(plain.head.weight, plain.embedding.weight)


@pytest.mark.world
def test_a_state_may_be_loaded_before_the_partitioning() -> None:
    def body() -> Any:
        model = start()
        model.load_state_dict(build(seed=2).state_dict())
        model.eval()
        return evaluate(model, TOKENS).concat()

    for found in run_world(2, body):
        torch.testing.assert_close(found, build(seed=2).eval()(TOKENS).detach())


@pytest.mark.world
def test_types_may_change_before_and_after_the_partitioning() -> None:
    def body() -> Any:
        model = start()
        model.eval()
        model.to(torch.float64)
        first = evaluate(model, TOKENS).concat()
        train(model, TOKENS)
        assert model.to(torch.bfloat16) is model
        model.zero_grad()
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        second = evaluate(model, TOKENS).concat()
        train(model, TOKENS)
        gradients = {p.grad.dtype for p in model.local_parameters() if p.grad is not None}
        assert gradients == {torch.bfloat16}
        return first, second

    expected = build().eval().double()(TOKENS).detach()
    for first, second in run_world(2, body):
        torch.testing.assert_close(first, expected)
        assert second.dtype == torch.bfloat16
        torch.testing.assert_close(second.double(), expected, rtol=0.1, atol=0.1)


@pytest.mark.world
def test_backward_takes_several_tensors_and_their_gradients() -> None:
    def body() -> Any:
        model = start()
        model.eval()

        @smp.step
        def step(model: Any, tokens: Tensor) -> None:
            out = model(tokens)
            model.backward([out, out.mean()], [torch.ones(4, 8), None])

        step(model, TOKENS)
        return {name: p.grad for name, p in model.local_named_parameters()}

    plain = build().eval()
    for part in TOKENS.chunk(2):
        out = plain(part)
        torch.autograd.backward([out, out.mean()], [torch.full((4, 8), 0.5), torch.tensor(0.5)])
    for gradients in run_world(2, body):
        for name, gradient in gradients.items():
            expected = plain.get_parameter(name).grad
            torch.testing.assert_close(gradient, expected)


@pytest.mark.world
def test_a_loss_that_is_no_scalar_or_has_no_history_is_explained() -> None:
    def on_vector(model: Any, tokens: Tensor) -> None:
        model.backward(model(tokens))

    def on_constant(model: Any, tokens: Tensor) -> None:
        model(tokens)
        model.backward(torch.zeros(()))

    def body(step: Any) -> None:
        smp.step(step)(start(), TOKENS)

    for step, message in (
        (on_vector, "UsageError: model.backward got a tensor of shape (4, 8); pass a scalar loss"),
        (on_constant, "UsageError: model.backward got a tensor that does not depend on any param"),
    ):
        for outcome in run_world_expecting_failure(2, body, step):
            assert outcome.exit_code == 1
            assert message in outcome.stderr_text


@pytest.mark.world
def test_the_report_of_a_step_is_at_hand() -> None:
    def body() -> Any:
        model = start()
        train(model, TOKENS)
        report = model.step_report()
        return 0 < report.busy <= report.wall, 0 <= report.bubble < 1

    assert run_world(2, body) == [(True, True)] * 2
