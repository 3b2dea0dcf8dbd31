"""A client: pretrains BERT with LAMB, mixed precision, two losses and partial checkpoints."""

import argparse
import os

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, SequentialSampler
from transformers import BertConfig, BertForPreTraining

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.nn import FusedLayerNorm
from smdistributed.modelparallel.torch.optimizers import FusedLAMB
from smdistributed.modelparallel.torch.utils import rmsg

history = []


class PretrainingDataset(Dataset):
    def __init__(self, vocab_size, dp_rank, dp_size):
        generator = np.random.RandomState(0)
        tokens = generator.randint(4, vocab_size, (64, 12))
        self.inputs = [
            tokens,
            generator.randint(0, 2, (64, 12)),
            np.concatenate([np.ones((64, 9)), generator.randint(0, 2, (64, 3))], 1),
            np.where(generator.rand(64, 12) < 0.4, tokens, -1),
            generator.randint(0, 2, 64),
        ]
        self.inputs = [column[dp_rank::dp_size] for column in self.inputs]

    def __len__(self):
        return len(self.inputs[0])

    def __getitem__(self, index):
        return [torch.from_numpy(np.asarray(column[index])).long() for column in self.inputs]


class BertPretrainingCriterion(torch.nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        # Sums, so that microbatches with more labels do not weigh more.
        self.loss_fn = torch.nn.CrossEntropyLoss(ignore_index=-1, reduction="sum")
        self.vocab_size = vocab_size

    def forward(self, prediction_scores, seq_relationship_score, masked_lm_labels, next_labels):
        masked_lm_loss = self.loss_fn(
            prediction_scores.view(-1, self.vocab_size), masked_lm_labels.view(-1)
        )
        next_loss = self.loss_fn(seq_relationship_score.view(-1, 2), next_labels.view(-1))
        return masked_lm_loss / (5 * len(next_labels)), next_loss / len(next_labels)


class PolyWarmUpScheduler(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer, warmup, total_steps, degree=0.5, last_epoch=-1):
        self.warmup, self.total_steps, self.degree = warmup, total_steps, degree
        super().__init__(optimizer, last_epoch)

    def get_lr(self):
        progress = (self.last_epoch + 1) / self.total_steps
        share = progress / self.warmup if progress < self.warmup else (1 - progress) ** self.degree
        return [base_lr * share for base_lr in self.base_lrs]


@smp.step
def bert_step(
    args, device, input_ids, segment_ids, input_mask, lm_labels, next_labels, model, criterion,
    scaler,
):  # fmt: skip
    with torch.cuda.amp.autocast(args.fp16 > 0, dtype=torch.bfloat16):
        output = model(input_ids=input_ids, token_type_ids=segment_ids, attention_mask=input_mask)
        lm_loss, next_loss = criterion(
            output.prediction_logits, output.seq_relationship_logits, lm_labels, next_labels
        )
        loss = lm_loss + next_loss
        loss /= args.gradient_accumulation_steps
    if scaler is not None:
        model.backward(scaler.scale(loss).squeeze())
    else:
        model.backward(loss)
    return loss, {"lm": lm_loss, "next": next_loss}


def parse_arguments():
    parser = argparse.ArgumentParser()
    for name, default in (
        ("partitions", 1), ("microbatches", 2), ("train_batch_size", 8), ("max_steps", 3),
        ("gradient_accumulation_steps", 1), ("fp16", 0), ("seed", 42), ("ddp", 0), ("resume", 0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learning_rate", type=float, default=2e-2)
    parser.add_argument("--output_dir", default="")
    return parser.parse_args()


def main():
    args = parse_arguments()
    smp.init(
        {
            "partitions": args.partitions,
            "microbatches": args.microbatches,
            "pipeline": "interleaved",
            "optimize": "speed",
            "memory_weight": 0.5,
            "placement_strategy": "spread",
            "ddp": args.ddp,
        }
    )
    assert smp.is_initialized()
    torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda", smp.local_rank())
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForPreTraining(config)
    model.cls.predictions.transform.LayerNorm = FusedLayerNorm(32, eps=1e-12)
    criterion = BertPretrainingCriterion(config.vocab_size)
    model = smp.DistributedModel(model)
    model.to(device)
    no_decay = ["bias", "gamma", "beta", "LayerNorm"]
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not any(kind in n for kind in no_decay)],
         "weight_decay": 0.01},
        {"params": [p for n, p in named if any(kind in n for kind in no_decay)],
         "weight_decay": 0.0},
    ]  # fmt: skip
    optimizer = smp.DistributedOptimizer(FusedLAMB(groups, lr=args.learning_rate))
    scheduler = PolyWarmUpScheduler(optimizer, warmup=0.3, total_steps=10)
    scaler = smp.amp.GradScaler() if args.fp16 else None
    if args.resume:
        state = smp.load(os.path.join(args.output_dir, "ckpt.pt"), partial=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])

    data = PretrainingDataset(config.vocab_size, smp.dp_rank(), smp.dp_size())
    sampler = SequentialSampler(data)
    loader = DataLoader(
        data, sampler=sampler, batch_size=args.train_batch_size, num_workers=0, pin_memory=True,
        drop_last=True,
    )  # fmt: skip
    model.train()
    for step, batch in enumerate(loader):
        if step >= args.max_steps:
            break
        batch = [t.to(device) for t in batch]
        optimizer.zero_grad()
        loss_mb, parts = bert_step(args, device, *batch, model, criterion, scaler)
        loss = loss_mb.reduce_mean()
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        scheduler.step()
        average = loss.detach().clone()
        torch.distributed.all_reduce(average, group=smp.get_dp_process_group())
        history.append(average.item() / smp.dp_size())
        assert abs(sum(part.reduce_mean().item() for part in parts.values()) - loss.item()) < 0.05
        if smp.rank() == 0:
            print(rmsg(f"step {step}: {loss.item():.4f}, lr {scheduler.get_last_lr()[0]:.5f}"))
    if args.output_dir and not args.resume and smp.dp_rank() == 0:
        smp.save(
            {
                "model": model.local_state_dict(),
                "optimizer": optimizer.local_state_dict(),
                "scheduler": scheduler.state_dict(),
            },
            os.path.join(args.output_dir, "ckpt.pt"),
            partial=True,
        )
    smp.barrier()


if __name__ == "__main__":
    main()
