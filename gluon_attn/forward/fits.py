"""Whether a config can compute a problem on a device, and why not."""

from ..bias import Bias
from ..device import Device
from ..problem import Problem, needs_no_maximum
from ..score_mod import NEAR_ZERO
from ..tensors import FP8_DTYPES
from .configs import BlackwellConfig, ForwardConfig, HopperConfig, piece_columns

LARGEST_HEAD_DIM_V = 128  # on Blackwell
MOST_ROLES_WITH_BIAS = 2  # of each row: a role with others' rows now and then would have to choose its tile


def require_supported(problem: Problem, device: Device) -> None:
    """NotImplementedError for a problem that the kernel of the device's architecture does not compute."""
    if device.arch != 90 and problem.padded_head_dim_v > LARGEST_HEAD_DIM_V:
        raise NotImplementedError(
            f"v: head_dim {problem.head_dim_v} on a Blackwell card is not supported: expected at most "
            f"{LARGEST_HEAD_DIM_V}, as two query tiles with outputs of 256 columns leave no tensor memory for their "
            "scores; those of q and k may be larger"
        )


def require_ctas(num_ctas: int | None, device: Device) -> None:
    """ValueError for a number of CTAs that the device's kernel does not have."""
    possible = (1, 2) if device.arch == 90 else (1, 2, 4)
    if num_ctas is not None and num_ctas not in possible:
        raise ValueError(
            f"num_ctas: expected one of {possible} or None for {device.name}, got {num_ctas}; leave it out"
        )


def require_fits(config: ForwardConfig, problem: Problem, device: Device) -> None:
    """ValueError unless the config is for the device and the problem's dtype, and fits into its memory."""
    require_supported(problem, device)
    if device.arch not in config.archs:
        if isinstance(config, BlackwellConfig) and device.arch != 90:
            raise ValueError(
                f"config: expected max_in_load=False for {device.name}, got {config.max_in_load}; only sm_103 has it"
            )
        kind = "HopperConfig" if device.arch == 90 else "BlackwellConfig"
        raise ValueError(f"config: expected a {kind} for {device.name}, got a {type(config).__name__}")
    if isinstance(config, HopperConfig):
        require_fits_dtype(config, problem)
    elif (
        isinstance(config, BlackwellConfig) and config.early_p and config.block_n == 64 and problem.dtype in FP8_DTYPES
    ):
        raise ValueError(
            f"config: expected block_n=128 with early_p for {problem.dtype}, got 64: a quarter of P would be less than "
            "the tensor cores multiply"
        )
    if isinstance(config, BlackwellConfig) and config.rescale_threshold > 0 and problem.dtype in FP8_DTYPES:
        raise ValueError(
            f"config: expected rescale_threshold=0 for {problem.dtype}, in which P beyond its scale would overflow, "
            f"got {config.rescale_threshold}"
        )
    if isinstance(config, BlackwellConfig) and config.dynamic and problem.sequences is not None:
        raise ValueError(
            "config: expected dynamic=False with packed sequences, which programs take from a list, got True"
        )
    require_fits_scores(config, problem)
    needed = config.smem_bytes(problem.padded_head_dim, problem.dtype.itemsize, problem.padded_head_dim_v)
    if problem.bias is not None:
        require_fits_bias(config, problem.bias)
        needed += config.bias_bytes(problem.bias)
    if needed > device.smem_bytes:
        raise ValueError(
            f"config: expected a config that fits the {device.smem_bytes} bytes of shared memory of {device.name}, "
            f"got one that needs {needed} at head_dim {head_dims_of(problem)}; lower kv_slots, query_slots or block_n"
        )


def require_fits_dtype(config: HopperConfig, problem: Problem) -> None:
    """ValueError for what does not go with the problem's dtype: in fp8 O staged in Q's tile, maxima as integers, or a
    role that transposes V with too little to do; in 16 bits such a role at all. And at some head dims O staged in Q's
    tile, or such a role."""
    fp8 = problem.dtype in FP8_DTYPES
    if config.integer_max and fp8:
        raise ValueError(
            f"config: expected integer_max=False for {problem.dtype}, beyond whose largest number P could be, got "
            "True; leave it out"
        )
    if config.stage_in_queries and fp8:
        raise ValueError(
            f"config: expected stage_in_queries=False for {problem.dtype}, whose O is larger than its Q, got True"
        )
    if config.transpose_registers > 0 and not fp8:
        raise ValueError(
            f"config: expected transpose_registers=0 for {problem.dtype}, got {config.transpose_registers}"
        )
    if config.stage_in_queries and not can_stage(problem):
        raise ValueError(
            f"config: expected stage_in_queries=False at head_dim {head_dims_of(problem)}, where O has no room in Q's "
            "tile, or other pieces, got True"
        )
    if config.transpose_registers > 0 and piece_columns(problem.padded_head_dim_v) < problem.padded_head_dim_v:
        raise ValueError(
            f"config: expected transpose_registers=0 at head_dim {head_dims_of(problem)}, where V is in pieces, got "
            f"{config.transpose_registers}"
        )
    if config.transpose_registers > 0 and config.block_n * problem.padded_head_dim_v < 128 * 64:
        raise ValueError(
            f"config: expected transpose_registers=0 for blocks of {config.block_n} keys at head_dim "
            f"{head_dims_of(problem)}, got {config.transpose_registers}: too few values for a warpgroup"
        )


def require_fits_scores(config: ForwardConfig, problem: Problem) -> None:
    """ValueError for a lever that looks at raw scores, where a function changes them after; Hopper's integer_max looks
    at what that has made. And for one that is right for some functions alone."""
    if problem.score_mod is not None and isinstance(config, BlackwellConfig) and config.max_in_load:
        raise ValueError(
            "config: expected max_in_load=False with a score_mod, as it finds the maxima of scores before that, got "
            "True"
        )
    if (
        isinstance(config, HopperConfig)
        and config.half_by_polynomial
        and not needs_no_maximum(problem.score_mod, problem.dtype)
    ):
        raise ValueError(
            f"config: expected half_by_polynomial=False but for softcap of at most {NEAR_ZERO:g} in bf16, got True: "
            "the polynomial is for exponents of small magnitude"
        )


def require_fits_bias(config: ForwardConfig, bias: Bias) -> None:
    """ValueError for more CTAs than one, whose K is the same and whose rows are not; for many roles; and for a lever
    that looks at scores without it."""
    if config.num_ctas > 1:
        raise ValueError(
            f"config: expected one CTA with a bias, got {config.num_ctas}; give num_ctas=1, or leave it out"
        )
    if isinstance(config, BlackwellConfig) and config.max_in_load:
        raise ValueError(
            "config: expected max_in_load=False with a bias, as it finds the maxima of scores before that, got True"
        )
    if isinstance(config, HopperConfig) and bias.each_row and config.softmax_roles > MOST_ROLES_WITH_BIAS:
        raise ValueError(
            f"config: expected at most {MOST_ROLES_WITH_BIAS} softmax_roles with a bias of each row, got "
            f"{config.softmax_roles}"
        )


def can_stage(problem: Problem) -> bool:
    """Whether O, in blocks as wide as Q's pieces, has room in Q's tile."""
    columns, columns_v = piece_columns(problem.padded_head_dim), piece_columns(problem.padded_head_dim_v)
    return problem.padded_head_dim_v <= problem.padded_head_dim and columns <= columns_v <= 2 * columns


def head_dims_of(problem: Problem) -> str:
    """As a message names them."""
    alike = problem.head_dim == problem.head_dim_v
    return f"{problem.head_dim}" if alike else f"{problem.head_dim} (v's: {problem.head_dim_v})"
