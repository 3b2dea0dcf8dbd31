"""Loads a saved folder with nothing but transformers and measures its held-out loss again.

    python examples/check_saved_model.py runs/finetune_cpu

Exits with an error unless it is the loss that the training run printed.
"""

import json
import math
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-5  # relative; sums of float32 in another order differ by less

folder = Path(sys.argv[1])
held_out = json.loads((folder / "held_out.json").read_text())
model = AutoModelForCausalLM.from_pretrained(folder)

losses = []
with torch.no_grad():
    for tokens in torch.tensor(held_out["token_ids"]).split(held_out["batch_size"]):
        losses.append(model(input_ids=tokens, labels=tokens).loss.item())

loss = sum(losses) / len(losses)
print(f"held-out loss: {loss:.6f} by transformers alone, {held_out['loss']:.6f} in training")
if not math.isclose(loss, held_out["loss"], rel_tol=TOLERANCE):
    sys.exit(f"{folder} does not give the loss of the training run")
