"""Settings of 16-bit training that every torch allowed can run."""

import pytest
import torch

# Before 2.10, gradients of 16-bit parameters add up in their own type only.
ADDS_IN_FLOAT32 = hasattr(torch.Tensor, "grad_dtype")

BF16 = {"bf16": True, "fp32_grad_accumulation": ADDS_IN_FLOAT32}
FP16 = {"fp16": True, "fp32_grad_accumulation": ADDS_IN_FLOAT32}

needs_float32_sums = pytest.mark.skipif(
    not ADDS_IN_FLOAT32, reason="this torch can't add up gradients in float32"
)
