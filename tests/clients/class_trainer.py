"""A client: a trainer class whose steps are methods without `self`, around an encoder-decoder."""

import argparse

import torch
import torch.nn.functional as F
from transformers import T5Config, T5ForConditionalGeneration

import smdistributed.modelparallel.torch as smp

history = []
final = {}


class SMPTrainer:
    def __init__(self, args, model, optimizer, scheduler):
        self.args, self.model = args, model
        self.optimizer, self.scheduler = optimizer, scheduler

    # Not bound: a step is an instance, and no function.
    @smp.step(non_split_inputs=["weights"], input_split_axes={"decoder_mask": 1})
    def train_step(model, batch, weights, decoder_mask, scale=1.0):
        output = model(input_ids=batch["input_ids"], labels=batch["labels"])
        picked = F.cross_entropy(
            output["logits"].transpose(1, 2), batch["labels"], weight=weights, reduction="none"
        )
        loss = (picked * decoder_mask.t()).mean() * scale
        loss += 0.0
        model.backward(loss)
        size = len(batch["input_ids"])
        return {"loss": loss, "logits": output["logits"], "size": size, "name": "t5"}

    @smp.step()
    def eval_step(model, batch):
        return model(**batch)

    def train(self, batches):
        self.model.train()
        for batch, mask in batches:
            self.optimizer.zero_grad(set_to_none=True)
            result = self.train_step(self.model, batch, torch.linspace(0.5, 1.5, 48), mask)
            assert result["size"] == [len(mask.t()) // self.args.microbatches] * len(result["size"])
            assert result["name"] == ["t5"] * self.args.microbatches
            assert result["logits"].concat().shape[0] == len(mask.t())
            norm = self.model.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.scheduler.step()
            history.append(result["loss"].reduce_mean().item())
            final.setdefault("norms", []).append(norm.item())

    def evaluate(self, batches):
        self.model.eval()
        total = 0.0
        with torch.no_grad():
            for batch, _ in batches:
                output = self.eval_step(self.model, batch)
                total += output.loss.reduce_mean().item()
        losses = smp.allgather(total / len(batches), smp.CommGroup.DP_GROUP)
        history.append(sum(losses) / len(losses))


def make_batches(args, count):
    """Splits each global batch over the replicas; all ranks of a replica draw the same."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        ids = torch.randint(2, 48, (args.batch_size, 7), generator=generator)
        labels = (ids[:, :5] * 7) % 48
        mask = torch.rand(5, args.batch_size, generator=generator)
        mine = list(range(smp.dp_rank(), args.batch_size, smp.dp_size()))
        yield {"input_ids": ids[mine], "labels": labels[mine]}, mask[:, mine]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--mp_parameters", type=str, default="")
    args = parser.parse_args()
    smp.init({"partitions": args.partitions, "microbatches": args.microbatches, "ddp": True})
    smp.init({"partitions": 7})  # ignored
    torch.cuda.set_device(smp.local_rank())
    torch.manual_seed(5)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=48, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
            dropout_rate=0.0, decoder_start_token_id=0,
        )
    )  # fmt: skip
    model = smp.DistributedModel(model, trace_device="cpu")
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    called = final.setdefault("hooks", [])
    model.register_post_partition_hook(lambda m, o: called.append(("partition", o is optimizer)))
    model.register_post_step_hook(lambda m, o: called.append(("step", m is model)))
    trainer = SMPTrainer(args, model, optimizer, scheduler)
    trainer.train(list(make_batches(args, 3)))
    trainer.evaluate(list(make_batches(args, 2)))
    assert 0 in smp.get_tp_group() or smp.rank() != 0
    final["local"] = len(list(model.local_parameters()))


if __name__ == "__main__":
    main()
