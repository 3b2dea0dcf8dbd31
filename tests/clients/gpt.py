"""A client: pretrains a GPT-2 as SMP 1.10's scripts did, with their data pipeline and options."""

import argparse
import logging
import math
import os
import time

import numpy as np
import torch
import torch.nn as nn
import torch.utils.data
from packaging import version as pversion
from torch import optim
from transformers import AutoModelForCausalLM, GPT2Config, set_seed
from transformers.trainer_utils import is_main_process

import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.nn import FusedLayerNorm as LayerNorm
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import (
    translate_hf_state_dict_to_smdistributed_gpt2,
    translate_state_dict_to_hf_gpt2,
)

logging.basicConfig(level=logging.INFO)
logger = logging.getLogger(__name__)
history = []
final = {}


class AnnealingLR:
    """Warms up linearly and decays by a cosine, by writing to the groups of the optimizer."""

    def __init__(self, optimizer, start_lr, warmup_iter, num_iters, min_lr):
        self.optimizer = optimizer
        self.start_lr, self.warmup_iter = start_lr, warmup_iter
        self.end_iter, self.min_lr, self.num_iters = num_iters, min_lr, 0
        self.step(0)

    def get_lr(self):
        if self.num_iters <= self.warmup_iter:
            return self.start_lr * (self.num_iters + 1) / (self.warmup_iter + 1)
        share = (self.num_iters - self.warmup_iter) / (self.end_iter - self.warmup_iter)
        return max(self.start_lr / 2 * (math.cos(math.pi * share) + 1), self.min_lr)

    def step(self, step_num=None):
        self.num_iters = self.num_iters + 1 if step_num is None else step_num
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr()

    def state_dict(self):
        return {"num_iters": self.num_iters}

    def load_state_dict(self, sd):
        self.step(sd["num_iters"])


class Tokens(torch.utils.data.Dataset):
    def __init__(self, size, length, vocab):
        generator = np.random.RandomState(0)
        self.rows = generator.randint(0, vocab, (size, 1)) + np.arange(length)
        self.rows %= vocab

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = torch.tensor(self.rows[index])
        return row, torch.ones_like(row)


class DummyDataset(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length = length

    def __getitem__(self, index):
        return torch.FloatTensor(), torch.FloatTensor()

    def __len__(self):
        return self.length


def create_dataloader(args, dp_rank, dp_size, size):
    if smp.pp_rank() == 0:
        data = Tokens(size, args.max_context_width, args.vocab_size)
        sampler = torch.utils.data.DistributedSampler(
            data, shuffle=False, seed=args.seed, rank=dp_rank, num_replicas=dp_size, drop_last=True
        )
        dataloader = torch.utils.data.DataLoader(
            data, sampler=sampler, batch_size=args.train_batch_size, num_workers=0,
            pin_memory=True, drop_last=True,
        )  # fmt: skip
        smp.broadcast(len(dataloader), smp.PP_GROUP)
    else:
        data_len = smp.recv_from(0, smp.RankType.PP_RANK)
        dataloader = torch.utils.data.DataLoader(
            DummyDataset(data_len * args.train_batch_size),
            batch_size=args.train_batch_size,
            num_workers=0,
            drop_last=True,
        )
    return dataloader


def get_param_groups_by_weight_decay(module):
    weight_decay_params = {"params": []}
    no_weight_decay_params = {"params": [], "weight_decay": 0.0}
    param_ids = set()
    for module_ in module.modules():
        is_norm = isinstance(module_, (LayerNorm, nn.LayerNorm))
        for name, param in module_._parameters.items():
            if param is None or id(param) in param_ids:
                continue
            param_ids.add(id(param))
            kept = no_weight_decay_params if is_norm or name == "bias" else weight_decay_params
            kept["params"].append(param)
    return weight_decay_params, no_weight_decay_params


@smp.step
def train_step(model, optimizer, input_ids, attention_mask, args):
    output = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)
    loss = output["loss"]
    model.backward(loss)
    if args.logits_output:
        return output
    return loss


@smp.step
def test_step(model, input_ids, attention_mask):
    return model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]


def eval_model(model, dataloader):
    model = model.eval()
    n_batches, loss = 0, 0.0
    with torch.no_grad():
        for input_ids, attention_mask in dataloader:
            loss += test_step(model, input_ids, attention_mask).reduce_mean()
            n_batches += 1
    torch.distributed.all_reduce(loss, group=smp.get_dp_process_group())
    loss /= smp.dp_size()
    loss /= n_batches
    loss = loss.item()
    return loss, math.exp(loss)


def train(model, optimizer, lr_scheduler, total_steps, args):
    model.train()
    dp_rank = smp.dp_rank() if not args.prescaled_batch else smp.rdp_rank()
    dp_size = smp.dp_size() if not args.prescaled_batch else smp.rdp_size()
    dataloader = create_dataloader(args, dp_rank, dp_size, 96)
    for batch_idx, (input_ids, attention_mask) in enumerate(dataloader):
        if batch_idx < total_steps:
            continue
        step_start = time.time()
        optimizer.zero_grad(set_to_none=True)
        if args.logits_output:
            train_output = train_step(model, optimizer, input_ids, attention_mask, args)
            loss_mb = train_output["loss"]
            logits_mb = train_output["logits"]
            logits = torch.cat(tuple(logits_mb.outputs), dim=1 if smp.tp_size() > 1 else 0)
            assert logits.shape == (args.train_batch_size, args.max_context_width, args.vocab_size)
        else:
            loss_mb = train_step(model, optimizer, input_ids, attention_mask, args)
        loss = loss_mb.reduce_mean()
        if args.grad_clip and not args.fp16:
            optimizer.clip_master_grads(args.grad_clip)
        optimizer.step()
        if not (args.fp16 and optimizer.overflow):
            lr_scheduler.step()
        total_steps += 1
        history.append(loss.item())
        torch.cuda.synchronize()
        throughput = input_ids.shape[0] * dp_size / (time.time() - step_start)
        if smp.rank() == 0:
            logger.info(f"({total_steps}) loss {loss.item():.4f}, {throughput:.1f} samples/s")
        if args.validation_freq and not total_steps % args.validation_freq:
            val_loss, val_ppl = eval_model(model, create_dataloader(args, dp_rank, dp_size, 32))
            history.append(val_loss)
            if is_main_process(smp.rank()):
                logger.info(f"validation: loss {val_loss}, perplexity {val_ppl}")
            model = model.train()
        if args.checkpoint_freq and not total_steps % args.checkpoint_freq:
            smp.save_checkpoint(
                args.checkpoint_dir,
                tag=f"step{total_steps}",
                partial=True,
                model=model,
                optimizer=optimizer,
                user_content={
                    "cli_args": args.__dict__,
                    "total_steps": total_steps,
                    "lr_scheduler": lr_scheduler.state_dict(),
                },
                num_kept_partial_checkpoints=2,
            )
        if total_steps >= args.max_steps:
            break
    return total_steps


def parse_args():
    parser = argparse.ArgumentParser()
    group = parser.add_argument
    for name, default in (
        ("max_steps", 4), ("seed", 12345), ("same_seed", 0), ("fp16", 0), ("bf16", 0),
        ("logits_output", 0), ("validation_freq", 2), ("checkpoint_freq", 0), ("load_partial", 0),
        ("train_batch_size", 4), ("vocab_size", 64), ("hidden_width", 32), ("num_layers", 3),
        ("num_heads", 2), ("max_context_width", 16), ("tensor_parallel_degree", 1),
        ("pipeline_parallel_degree", 1), ("microbatches", 2), ("active_microbatches", None),
        ("shard_optimizer_state", 0), ("offload_activations", 0), ("fast_mode", 0),
        ("static_mode", 0), ("delayed_param", 0), ("activation_loading_horizon", 4),
        ("skip_tracing", 0), ("prescaled_batch", 0), ("manual_partition", 0), ("match_weights", 0),
        ("activation_checkpointing", 0), ("sharded_data_parallel_degree", 1),
        ("use_distributed_transformer", 0), ("save_final_full_model", 1),
    ):  # fmt: skip
        group(f"--{name}", type=int, default=default)
    for name, default in (("lr", 1e-2), ("weight_decay", 0.1), ("grad_clip", 1.0), ("drop", 0.0)):
        group(f"--{name}", type=float, default=default)
    for name, default in (
        ("checkpoint_dir", ""), ("placement_strategy", "cluster"), ("optimize", "speed"),
        ("activation_strategy", "each"),
    ):  # fmt: skip
        group(f"--{name}", type=str, default=default)
    return parser.parse_known_args()[0]


def main():
    args = parse_args()
    smp_config = {
        "ddp": True,
        "tensor_parallel_degree": args.tensor_parallel_degree,
        "pipeline_parallel_degree": args.pipeline_parallel_degree,
        "microbatches": args.microbatches,
        "shard_optimizer_state": args.shard_optimizer_state > 0,
        "prescaled_batch": args.prescaled_batch > 0,
        "fp16": args.fp16 > 0,
        "bf16": args.bf16 > 0,
        "offload_activations": args.offload_activations > 0,
        "delayed_parameter_initialization": args.delayed_param > 0,
        "optimize": args.optimize,
        "placement_strategy": args.placement_strategy,
        "activation_loading_horizon": args.activation_loading_horizon,
        "skip_tracing": args.skip_tracing > 0,
        "auto_partition": not args.manual_partition,
        "default_partition": 0,
        "static_mode": args.static_mode > 0,
        "fast_mode": args.fast_mode > 0,
        "_match_weights": args.match_weights > 0,
        "sharded_data_parallel_degree": args.sharded_data_parallel_degree,
        "sdp_gradient_clipping": args.grad_clip,
        "sdp_hierarchical_allgather": False,
    }
    if args.active_microbatches is not None:
        smp_config["active_microbatches"] = args.active_microbatches
    smp.init(smp_config)
    smp_version = pversion.parse(smdistributed.modelparallel.__version__)
    assert smp_version >= pversion.parse("1.10")
    if smp.rank() == 0:
        logger.info(f"Arguments: {args.__dict__}")
    torch.cuda.set_device(smp.local_rank())
    set_seed(args.seed + smp.tp_rank() if not args.same_seed else args.seed)

    model_config = GPT2Config(
        vocab_size=args.vocab_size,
        n_positions=args.max_context_width,
        n_embd=args.hidden_width,
        n_layer=args.num_layers,
        n_head=args.num_heads,
        activation_function="gelu_new",
        resid_pdrop=args.drop,
        embd_pdrop=args.drop,
        attn_pdrop=args.drop,
        initializer_range=0.02,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=1,
        return_dict=True,
    )
    with smp.model_creation(
        tensor_parallelism=smp.tp_size() > 1 or args.use_distributed_transformer > 0,
        dtype=torch.get_default_dtype(),
        attention_in_fp32=False,
        query_key_layer_scaling=False,
        fused_softmax=True,
        fused_bias_gelu=True,
    ):
        model = AutoModelForCausalLM.from_config(model_config)
    num_params = sum([np.prod(p.size()) for p in model.parameters()])
    if smp.rank() == 0:
        logger.info(f"# total parameters: {num_params}")
    model = smp.DistributedModel(model, trace_device="gpu", backward_passes_per_step=1)
    m = model.get_module()
    assert type(m) is type(model.module.module)
    if args.use_distributed_transformer > 0:
        transformer_layers = m.transformer.seq_layers
    else:
        transformer_layers = m.transformer.h
    if args.manual_partition:
        div, rem = divmod(args.num_layers, smp.pp_size())
        assignments = []
        for pp_rank in range(smp.pp_size()):
            assignments += [pp_rank] * (div + (1 if pp_rank >= smp.pp_size() - rem else 0))
        for i, c in enumerate(transformer_layers.children()):
            smp.set_partition(c, assignments[i])
    param_groups = get_param_groups_by_weight_decay(m)
    optimizer = optim.AdamW(
        param_groups, betas=(0.9, 0.95), lr=args.lr, weight_decay=args.weight_decay
    )
    if args.activation_checkpointing:
        kwargs = {}
        if isinstance(transformer_layers, nn.Sequential):
            kwargs = {"pack_args_as_tuple": True, "strategy": args.activation_strategy}
            smp.set_activation_checkpointing(transformer_layers, **kwargs)
        else:
            for c in transformer_layers.children():
                smp.set_activation_checkpointing(c)
    optimizer = smp.DistributedOptimizer(
        optimizer,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"scale_window": 1000, "min_scale": 1, "delayed_shift": 2},
    )
    lr_scheduler = AnnealingLR(optimizer, args.lr, 2, 20, 1e-5)
    model.register_post_partition_hook(lambda model, optimizer: torch.cuda.memory_allocated())
    total_steps = 0
    if args.load_partial:
        user_content = smp.resume_from_checkpoint(args.checkpoint_dir, tag=None, partial=True)
        total_steps = user_content["total_steps"]
        lr_scheduler.load_state_dict(user_content["lr_scheduler"])
        final["resumed_at"] = total_steps
    train(model, optimizer, lr_scheduler, total_steps, args)
    if args.save_final_full_model and smp.rdp_rank() == 0:
        state_dict = model.state_dict(gather_to_rank0=True)
        if smp.rank() == 0:
            state_dict = translate_state_dict_to_hf_gpt2(state_dict, args.max_context_width)
            translate_hf_state_dict_to_smdistributed_gpt2(state_dict)
            final.update(sums={k: v.double().sum().item() for k, v in state_dict.items()})
            if args.checkpoint_dir:
                smp.save(state_dict, os.path.join(args.checkpoint_dir, "full.pt"), partial=False)
    smp.barrier()
    if smp.rank() == 0:
        logger.info("SMP training finished successfully")


if __name__ == "__main__":
    main()
