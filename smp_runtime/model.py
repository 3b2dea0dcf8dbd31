"""`DistributedModel`: the user's model, partitioned over the pipeline ranks."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from . import device
from .creation.pending_values import forget
from .errors import NotSupportedError, UsageError
from .execution.body import current_body
from .execution.placing import LocalPart, named_state, seed_drawing_modules, to_device
from .execution.wrapping import Wrapper
from .messages.transport import Address, Topic
from .optimization.awaited_parameters import await_all
from .optimization.norms import clip_gradients, watch_clip_grad_norm
from .optimization.precision import Precision
from .optimization.remote_gradients import RemoteGradients
from .optimization.shared_parameters import SharedGradients, make_equal
from .optimizer import LocalOptimizer, keep_local
from .planning.partitioning import Partition, partition
from .planning.schedule import plan
from .recomputing.checkpointed_call import switched_off
from .recomputing.checkpointing_choice import Costs
from .recomputing.checkpointing_marks import (
    assignment_lines,
    check_all_marks,
    choose_modules,
    mark_chosen,
)
from .recomputing.measured_memory import MeasuredMemory
from .recomputing.saved_bytes import SavedBytes
from .recomputing.seq_layers import offer_seq_layers
from .replication.data_parallel import DataParallel, Held
from .replication.replicas import Replicas, broadcast_state
from .replication.replicated_model import ReplicatedModel
from .replication.roll_call import RollCall
from .runtime import current
from .saving.optimizer_state import NamesItsState, load_local_state, local_state, parameter_names
from .saving.pretrained import save_whole
from .saving.state import full_state_dict, load_into, merged
from .tensor_parallelism import TensorQueries
from .tracing.trace import trace_model

if TYPE_CHECKING:
    from torch.optim import Optimizer

_log = logging.getLogger("smp_runtime")

_Hook = Callable[[Any, Any], Any]


class DistributedModel(Wrapper, ReplicatedModel, TensorQueries):
    """Wraps a model; the one model of a script.

    The model is partitioned in the first step that calls it, from the sizes that this call
    shows. Parameter names stay those of the plain model.

    Args:
        module: any module, whole on every rank, with equal weights; or made in `model_creation`.
        trace_device: accepted for SMP's sake; the trace runs on fake tensors.
        trace_execution_times: partition by measured times instead of modelled ones.
        overlapping_allreduce: all-reduce gradients while the last microbatch's backward pass goes
            on, or after it. The result is the same, bit for bit.
        backward_passes_per_step: number of steps whose gradients are accumulated before they are
            averaged over replicas. They are summed: divide the loss where their mean is wanted.
        average_grads_across_microbatches: average gradients over microbatches, or sum them.
        bucket_cap_mb: most megabytes of gradients that one all-reduce takes.
        trace_memory_usage: accepted; activations are counted in any case.
        broadcast_buffers: after each reduction give all replicas the first one's buffers.
        gradient_as_bucket_view: make gradients views of the all-reduced buckets, which saves a
            copy of them and its memory. Replicas that share memory need neither.

    Raises:
        UsageError: `init` was not called, or a model was wrapped before.
    """

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: float = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        runtime = current()
        if runtime.model is not None:
            raise UsageError("smp.DistributedModel was called before; a script has one model")
        if backward_passes_per_step < 1 or bucket_cap_mb <= 0:
            raise UsageError(
                f"smp.DistributedModel got backward_passes_per_step={backward_passes_per_step} and "
                f"bucket_cap_mb={bucket_cap_mb}: both must be positive"
            )
        precision = Precision(runtime.config)
        precision.convert(module)
        precision.prepare_gradients(module.parameters())
        super().__init__(module, self._call_module)
        offer_seq_layers(module)
        self._precision = precision
        runtime.model = self
        self.average_grads_across_microbatches = average_grads_across_microbatches
        self._runtime = runtime
        self._trace_execution_times = trace_execution_times
        self.data_parallel = DataParallel(
            Replicas(runtime),
            self._held,
            self._share_optimizer_state,
            bucket_bytes=int(bucket_cap_mb * 1024 * 1024),
            is_overlapped=overlapping_allreduce,
            as_views=gradient_as_bucket_view,
            broadcast_buffers=broadcast_buffers,
            passes=backward_passes_per_step,
        )
        runtime.at_end.append(self.data_parallel.close)
        self._shared_gradients: SharedGradients | None = None
        self._loss_scale = 1.0
        self._part: LocalPart | None = None
        self._remote_gradients: RemoteGradients | None = None
        self._partition: Partition | None = None
        self._is_traced = False
        self._counts_saved = False
        self.traced_costs: Costs | None = None
        self.measured_memory = MeasuredMemory(module)
        self._has_run_backward = False
        self._optimizer: Optimizer | None = runtime.early_optimizer
        self._post_partition_hooks: OrderedDict[int, _Hook] = OrderedDict()
        self._post_step_hooks: OrderedDict[int, _Hook] = OrderedDict()
        runtime.engine.module_names = {
            id(part): name for name, part in module.named_modules() if name
        }
        if runtime.placement.size("pp") > 1:
            runtime.engine.ownership.expect(module)
        else:
            for tensor in (*module.parameters(), *module.buffers()):
                to_device(tensor)
            forget()
            broadcast_state(module, self.data_parallel.replicas)
            self.data_parallel.watch_backward()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Converts what is here; what lives elsewhere only changes its type, and nothing moves."""
        if self._remote_gradients is not None:
            self._remote_gradients.clear()
        return super()._apply(fn, recurse)

    @property
    def device(self) -> torch.device:
        """The device of this rank, where a script should send its batches."""
        return device.current_device()

    # -- the step ----------------------------------------------------------------------------

    @property
    def partitioned(self) -> bool:
        """Whether modules have their ranks already."""
        return self._part is not None or self._runtime.placement.size("pp") == 1

    @property
    def is_traced(self) -> bool:
        """Whether the first step has watched the model."""
        return self._part is not None or self._is_traced

    @property
    def partition(self) -> Partition | None:
        """Which rank holds what, once the model is partitioned over several."""
        return self._partition

    def _call_module(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._precision.to_model((args, kwargs))
        return self._precision.from_model(self._call_converted(args, kwargs))

    def _call_converted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        body = current_body()
        if body is None:
            if self._runtime.placement.size("pp") > 1:
                raise UsageError(
                    "a model over several pipeline ranks can only be called inside a function "
                    "decorated with @smp.step"
                )
            if not torch.is_grad_enabled():
                await_all()
            return self.get_module()(*args, **kwargs)
        if self._runtime.placement.size("pp") == 1:
            if not self._is_traced:
                self._is_traced = True
                with body.glue.suspended(), torch.inference_mode(False):
                    trace = _trace(self.get_module(), args, kwargs)
                    seed_drawing_modules(self.get_module(), trace.drawing_modules)
                    self.traced_costs = Costs(trace.root, None, {0: 1})
                    chosen = choose_modules(self.get_module(), self.traced_costs)
                    mark_chosen(self.get_module(), chosen)
                    self._run_hooks(self._post_partition_hooks)
            with body.glue.suspended():
                return self.get_module()(*args, **kwargs)
        if self._part is None:
            # Parameters made in inference mode could never be trained.
            with body.glue.suspended(), torch.inference_mode(False):
                self._make_partition(args, kwargs)
        return self.get_module()(*args, **kwargs)

    def backward(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        grad_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> None:
        """Runs the backward pass of the current microbatch; in place of ``loss.backward()``.

        Args:
            tensors: the loss, or several tensors to differentiate.
            grad_tensors: their output gradients; 1 for a scalar if not given.
            retain_graph: not supported.
            create_graph: not supported.

        Raises:
            UsageError: called outside a step, or on something that needs no gradient.
        """
        if retain_graph or create_graph:
            raise NotSupportedError("model.backward supports no retain_graph and no create_graph")
        body = current_body()
        if body is None:
            raise UsageError("model.backward can only be called inside an @smp.step function")
        if self._part is None and self._runtime.placement.size("pp") > 1:
            raise UsageError(
                "model.backward was called before the model; call model(...) in the step, not its "
                "submodules or methods alone: it is partitioned in that call"
            )
        losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        gradients: list[torch.Tensor | None] = [None] * len(losses)
        if grad_tensors is not None:
            gradients = (
                [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else list(grad_tensors)
            )
        self._has_run_backward = True
        if body.loss_scale == 0.0:
            return  # a mean over nothing is NaN, and so would be its gradient
        with body.glue.suspended():
            body.backward_pass.run(losses, gradients)
            if self._remote_gradients is not None and not body.microbatch:
                self._remote_gradients.mark()  # the body may look at gradients

    def begin_step(
        self, num_microbatches: int, weights: Sequence[float] | None = None
    ) -> list[float]:
        """Called by the step before the bodies run; returns what each one's loss counts.

        Args:
            num_microbatches: of this step.
            weights: what each microbatch's loss weighs in a mean over all of them, those of other
                replicas included; all the same if not given.
        """
        self._has_run_backward = False
        tensors = (*self.local_parameters(), *self.local_buffers())
        self._runtime.engine.known.meter = SavedBytes(tensors) if self._counts_saved else None
        is_training = torch.is_grad_enabled()
        if not (is_training and self.is_traced):
            # A trace looks at parameters below Python, and modules of torch take other ways to
            # evaluate with parameters that are awaited.
            await_all()
        if weights is not None and not self.average_grads_across_microbatches:
            raise UsageError(
                "loss_weight makes gradients those of a mean: leave it out, or leave "
                "average_grads_across_microbatches at True"
            )
        weight = None if weights is None else sum(weights)
        total = self.data_parallel.begin_step(
            num_microbatches - 1, is_training=is_training, weight=weight
        )
        scaler = self._optimizer if isinstance(self._optimizer, LocalOptimizer) else None
        self._loss_scale = scaler.loss_scale if scaler is not None and is_training else 1.0
        # Gradients of earlier steps are unscaled, and what is added to them is not.
        self._scale_gradients(self._loss_scale)
        if self.partitioned:
            self._arm()
        if self._part is not None:
            self._shared_gradients = SharedGradients(self._runtime.engine, self._part.shared)
        if weights is None:
            share = 1.0 / num_microbatches if self.average_grads_across_microbatches else 1.0
            return [share * self._loss_scale] * num_microbatches
        # The mean over replicas follows, and must not count.
        factor = self._loss_scale * self.data_parallel.divisor / (total or 1.0)
        return [weight * factor for weight in weights]

    def _arm(self) -> None:
        """Prepares the gradients of this step, once it is known what this rank holds."""
        self._precision.prepare_gradients(self.local_parameters())
        self.data_parallel.arm()

    def _scale_gradients(self, factor: float) -> None:
        if factor != 1.0:
            gradients = [p.grad for p in self.local_parameters() if p.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, factor)

    def end_step(self) -> None:
        """Called by the step after the bodies: reduces gradients and runs hooks."""
        shared = self._shared_gradients
        if shared is None and self._part is not None:  # partitioned in this very step
            shared = SharedGradients(self._runtime.engine, self._part.shared, set_aside=False)
        self._shared_gradients = None
        if shared is not None:
            if self._has_run_backward:
                shared.add_up()
            else:
                shared.put_back()
        self.data_parallel.end_step(self._has_run_backward)
        self._scale_gradients(1.0 / self._loss_scale)
        if self._has_run_backward:
            meter = self._runtime.engine.known.meter
            self.measured_memory.note(0 if meter is None else meter.peak)
        if self._has_run_backward and self._remote_gradients is not None:
            self._remote_gradients.mark()
        once, self._post_step_hooks = self._post_step_hooks, OrderedDict()
        self._run_hooks(once)

    @property
    def attached_optimizer(self) -> Optimizer | None:
        """The optimizer that was given to `DistributedOptimizer`."""
        return self._optimizer

    @property
    def local_part(self) -> LocalPart | None:
        """What is local, once the model is partitioned over several ranks."""
        return self._part

    def when_partitioned(self, action: Callable[[], None]) -> None:
        """Does something once it is known what lives on this rank: now, or in the first step."""
        if self.partitioned:
            action()
        else:
            self.register_post_partition_hook(lambda *_: action())

    def _held(self) -> Held:
        shared = () if self._part is None else self._part.shared
        return Held(
            list(self.local_parameters()),
            [parameter for _, parameter, _ in shared],
            list(self.local_buffers()),
        )

    def _share_optimizer_state(self, source: int) -> None:
        """Gives all replicas the state that the optimizer has on one of them."""
        optimizer, replicas = self._optimizer, self.data_parallel.replicas
        if optimizer is None:
            return
        names = parameter_names(self.get_module())
        state, scaler = replicas.agree(
            lambda: (
                local_state(optimizer, names),
                optimizer.loss_scaler_state() if isinstance(optimizer, NamesItsState) else {},
            ),
            source,
        )
        if replicas.rank != source:
            load_local_state(optimizer, state, names)
            if isinstance(optimizer, NamesItsState):
                optimizer.load_loss_scaler_state(scaler)

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Called by `DistributedOptimizer`; the optimizer will hold this rank's parameters."""
        self._optimizer = optimizer
        if self._part is not None:
            keep_local(optimizer, self._part)

    def count_saved_bytes(self, enabled: bool = True) -> None:
        """Counts in later steps what is saved for backward passes: `step_report().saved_bytes`.

        Parameters and buffers don't count. Counting takes time: a few percent of a step.
        """
        self._counts_saved = enabled

    def step_report(self) -> Any:
        """Returns where the time of the last step went on this rank."""
        report = self._runtime.engine.report
        report.reductions = [
            (launched - report.began, reduced - report.began)
            for launched, reduced in self.data_parallel.spans
        ]
        return report

    # -- partitioning ------------------------------------------------------------------------

    def _make_partition(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        runtime, engine = self._runtime, self._runtime.engine
        rank = runtime.here.pp_rank
        for name, module in self.get_module().named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise NotSupportedError(
                    f"{name or 'the model'} is a ScriptModule, which can't be partitioned; pass "
                    "the Python module it was made of"
                )
        address = Address(Topic.PLAN, engine.step, 0, 0, 0)
        if rank == 0:
            told = self.data_parallel.replicas.agree(lambda: self._plan(args, kwargs))
            for peer in engine.transport.peers:
                engine.transport.send(peer, address, told)
        else:
            body = current_body()
            assert body is not None
            engine.wait(body, [address])
            told = engine.receive(address).content
        made, drawing = Partition.from_json(told[0]), frozenset(told[1])
        seed_drawing_modules(self.get_module(), drawing)
        self._partition = made
        self._part = LocalPart(self.get_module(), made, rank, engine.ownership, engine.reports)
        mark_chosen(self.get_module(), told[2])
        check_all_marks(self.get_module())
        if dist.get_rank() == 0:
            lines = assignment_lines(self.get_module())
            _log.info("Partition assignments:\n%s%s", made.table(), lines)
            _log.info("Finished partitioning the model")
        body = current_body()
        assert body is not None
        make_equal(self._part.shared, engine, body)
        broadcast_state(self.get_module(), self.data_parallel.replicas)
        self._arm()
        self._remote_gradients = RemoteGradients(self.get_module(), self._part)
        watch_clip_grad_norm(self._part, runtime)
        if self._optimizer is not None:
            keep_local(self._optimizer, self._part)
        self._run_hooks(self._post_partition_hooks)
        engine.set_stages(made.rank_of)

    def _plan(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[str, list[str], list[tuple[str, bool]]]:
        """Returns the partition as text, and which modules draw and are to be checkpointed."""
        trace = _trace(self.get_module(), args, kwargs, self._trace_execution_times)
        made = self._divide(trace.root)
        in_flight = self._num_in_flight(len(made.rank_of))
        held = {stage: in_flight(stage) for stage in range(len(made.rank_of))}
        self.traced_costs = Costs(trace.root, made, held)
        chosen = choose_modules(self.get_module(), self.traced_costs)
        return made.to_json(), sorted(trace.drawing_modules), chosen

    def _divide(self, root: Any) -> Partition:
        config = self._runtime.config
        pinned = None
        if not config.auto_partition:
            pinned = {
                name: self._runtime.manual[id(module)][1]
                for name, module in self.get_module().named_modules()
                if id(module) in self._runtime.manual
            }
        degree = config.pipeline_parallel_degree
        return partition(
            root,
            degree,
            stages_per_rank=config.stages_per_rank,
            memory_weight=config.memory_weight,
            tied=config.tied_weights,
            num_in_flight=self._num_in_flight(degree * config.stages_per_rank),
            pinned=pinned,
            default_partition=None if config.auto_partition else config.default_partition,
        )

    def _num_in_flight(self, num_stages: int) -> Callable[[int], int]:
        """How many microbatches each stage of a chain holds at once, by the schedule."""
        config = self._runtime.config
        ranks = [stage % config.pipeline_parallel_degree for stage in range(num_stages)]
        made = plan(
            ranks,
            config.microbatches,
            active=config.resolved_active_microbatches,
            policy=config.pipeline,
        )
        # A ring has a stage more than the chain that was planned.
        return lambda stage: made.peak_stashed(min(stage, num_stages - 1))

    def register_post_partition_hook(self, hook: _Hook) -> RemovableHandle:
        """Calls ``hook(model, optimizer)`` once the model is partitioned."""
        return _register(self._post_partition_hooks, hook)

    def register_post_step_hook(self, hook: _Hook) -> RemovableHandle:
        """Calls ``hook(model, optimizer)`` once, after the next step.

        Trainers load the state of the optimizer in it, which must not be repeated.
        """
        return _register(self._post_step_hooks, hook)

    def _run_hooks(self, hooks: dict[int, _Hook]) -> None:
        for hook in list(hooks.values()):
            hook(self, self._optimizer)

    def apply(self, fn: Callable[[nn.Module], None]) -> DistributedModel:
        """Calls a function with every module whose own parameters and buffers are on this rank."""
        part = self._part

        def if_local(module: nn.Module) -> None:
            own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            if part is None or all(part.is_local(tensor) for tensor in own):
                fn(module)

        self.get_module().apply(if_local)
        return self

    # -- the local part ----------------------------------------------------------------------

    def local_named_parameters(
        self, prefix: str = "", recurse: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters that this rank holds; all of them before the partitioning."""
        for name, parameter in self.named_parameters(prefix, recurse):
            if self._part is None or self._part.is_local(parameter):
                yield name, parameter

    def local_parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yields the parameters that this rank holds."""
        return (parameter for _, parameter in self.local_named_parameters(recurse=recurse))

    def local_named_buffers(
        self, prefix: str = "", recurse: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the buffers that this rank holds."""
        for name, buffer in self.named_buffers(prefix, recurse):
            if self._part is None or self._part.is_local(buffer):
                yield name, buffer

    def local_buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """Yields the buffers that this rank holds."""
        return (buffer for _, buffer in self.local_named_buffers(recurse=recurse))

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields the modules that run on this rank, with their names."""
        return iter(self.named_modules()) if self._part is None else self._part.modules()

    def local_modules(self) -> Iterator[nn.Module]:
        """Yields the modules that run on this rank."""
        return (module for _, module in self.local_named_modules())

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients so that their norm over the whole model is at most `max_norm`.

        Every rank calls it. Shared parameters count once.

        Returns:
            The norm before, equal on all ranks.
        """
        parameters = list(self.parameters())
        return clip_gradients(parameters, self._part, self._runtime, max_norm, norm_type)

    # -- state -------------------------------------------------------------------------------

    def local_state_dict(self) -> dict[str, Any]:
        """Returns this rank's entries of the state dict, under the plain model's names."""
        module = self.get_module()
        local = {name for name, tensor in named_state(module) if self._is_held(tensor)}
        state = {key: value for key, value in module.state_dict().items() if key in local}
        return {**state, "_smp_is_partial": True}

    def state_dict(self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any) -> Any:
        """Returns the whole state dict under the plain model's names. All ranks call it.

        Args:
            args: passed to `nn.Module.state_dict`.
            gather_to_rank0: only rank 0 of each pipeline group gets the tensors; an empty dict
                elsewhere.
            kwargs: passed to `nn.Module.state_dict`.
        """
        if self._part is None:
            return self.get_module().state_dict(*args, **kwargs)
        return full_state_dict(self.get_module(), self._part, self._runtime.engine, gather_to_rank0)

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
        same_partition_load: bool = False,
    ) -> Any:
        """Loads a state dict, whole or one part on each rank. Every rank calls it.

        Args:
            state_dict: by the plain model's names; what `local_state_dict` returned on any ranks
                is joined over the pipeline first.
            strict: names must be those of the model.
            assign: as for `nn.Module.load_state_dict`; only before the partitioning.
            same_partition_load: this rank's part is what it holds; nothing is joined.

        Raises:
            RuntimeError: `strict`, and keys are missing or unexpected, or shapes differ.
        """
        entries = {key: value for key, value in state_dict.items() if key != "_smp_is_partial"}
        if state_dict.get("_smp_is_partial") and not same_partition_load:
            entries = merged(entries, self._runtime.engine)
        if self._part is None:
            return self.get_module().load_state_dict(entries, strict, assign)
        return load_into(self.get_module(), entries, strict and not same_partition_load)

    def save_pretrained(
        self, folder: str | Path, tokenizer: Any = None, max_shard_size: int | str = "5GB"
    ) -> None:
        """Saves a folder that `from_pretrained` of transformers loads. Every rank calls it.

        Pipeline rank 0 writes, and holds one tensor at a time beside its own part.

        Args:
            folder: where to.
            tokenizer: is saved, too, if given.
            max_shard_size: largest size of a file, in bytes or like ``"5GB"``.

        Raises:
            CheckpointWriteError: a file can't be written.
        """
        roll = RollCall("model.save_pretrained")
        save_whole(
            roll,
            self.get_module(),
            self._part,
            self._runtime,
            Path(folder),
            tokenizer,
            max_shard_size,
        )

    def _is_held(self, tensor: torch.Tensor) -> bool:
        return self._part is None or self._part.is_local(tensor)


def _trace(
    module: nn.Module, args: Any, kwargs: Mapping[str, Any], measure_times: bool = False
) -> Any:
    global _is_tracing
    _is_tracing = True
    # In training mode, whatever the first step is for: that is when dropout draws.
    modes = [(part, part.training) for part in module.modules()]
    module.train()
    try:
        with switched_off():
            return trace_model(module, args, kwargs, measure_times=measure_times)
    finally:
        for part, mode in modes:
            part.training = mode
        _is_tracing = False


_is_tracing = False


def is_tracing() -> bool:
    """Says whether the model runs to be traced, and not for its result."""
    return _is_tracing


def _register(hooks: OrderedDict[int, _Hook], hook: _Hook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
