"""Names of torch and of other packages that have to do with CUDA."""

# Functions that make a tensor on the device that is named by an argument.
FACTORIES = [
    "arange",
    "as_tensor",
    "bartlett_window",
    "blackman_window",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "hamming_window",
    "hann_window",
    "kaiser_window",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "scalar_tensor",
    "sparse_coo_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
]
METHODS = ["to", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "type"]
TENSOR_TYPES = [
    "Bool",
    "Byte",
    "Char",
    "Double",
    "Float",
    "Half",
    "Int",
    "Long",
    "Short",
    "BFloat16",
]

# Packages that consist of CUDA kernels.
CUDA_PACKAGES = frozenset(
    [
        "amp_C",
        "apex",
        "apex_C",
        "bitsandbytes",
        "cupy",
        "fast_attention",
        "flash_attn",
        "fused_layer_norm_cuda",
        "transformer_engine",
        "xformers",
    ]
)

# Functions of torch.cuda that do nothing on a CPU.
WITHOUT_EFFECT = [
    "init",
    "synchronize",
    "empty_cache",
    "ipc_collect",
    "reset_peak_memory_stats",
    "set_stream",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_accumulated_memory_stats",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_per_process_memory_fraction",
]
