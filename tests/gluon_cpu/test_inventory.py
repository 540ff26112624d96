"""Every operation that Gluon offers has a test of what it computes, or a named refusal: none is forgotten.

A new release of Triton that adds an operation fails here, and so does one that drops one.
"""

import re

import pytest
import torch

import gluon_cpu
from tests.compat import (
    CompilationError,
    async_copy,
    gl,
    jit,
    libdevice,
    rubin,
    tma,
)
from tests.gluon_cpu import inventory
from tests.gluon_cpu.layouts import MATRIX, ROW
from tests.gluon_cpu.support import load_matrix, normal, poisoned, store_matrix

# Test: the operations for which it is the one to look at.
TESTED: dict[str, str] = {
    "test_atomics.py::test_a_poll_with_a_time_limit_gives_up": "gl.tensor.atomic_poll",
    "test_atomics.py::test_an_atomic_load_writes_nothing": "gl.atomic_load",
    "test_atomics.py::test_poll_of_a_tensor": "gl.atomic_poll",
    "test_atomics.py::test_scope_cta_orders_the_roles_of_a_cta": "gl.atomic_store",
    "test_compiler_memory.py::test_values_do_not_outlive_the_compilers_use": "gl.tensor.__not__",
    "test_semantics_arith.py::test_casts_round_to_nearest_even_or_truncate_to_int": "gl.tensor.to",
    "test_semantics_arith.py::test_exp2_and_log2_of_special_values": "gl.exp2 gl.log2",
    "test_semantics_arith.py::test_float_arithmetic": "gl.abs gl.ceil gl.clamp gl.div_rn gl.floor gl.sqrt_rn",
    "test_semantics_arith.py::test_fma_rounds_once": "gl.fma",
    "test_semantics_arith.py::test_int32_wraps_and_division_truncates": """
        gl.arange gl.tensor.__add__ gl.tensor.__and__ gl.tensor.__floordiv__ gl.tensor.__invert__ gl.tensor.__mod__
        gl.tensor.__mul__ gl.tensor.__neg__ gl.tensor.__or__ gl.tensor.__sub__ gl.tensor.__xor__
    """,
    "test_semantics_arith.py::test_math_functions": "gl.cos gl.erf gl.exp gl.log gl.rsqrt gl.sin gl.sqrt",
    "test_semantics_arith.py::test_maximum_ignores_or_propagates_nan": "gl.maximum",
    "test_semantics_arith.py::test_scalars": "gl.cdiv gl.minimum gl.where",
    "test_semantics_arith.py::test_shifts_arithmetic_logical_and_beyond_the_width": """
        gl.tensor.__lshift__ gl.tensor.__rshift__
    """,
    "test_semantics_barriers.py::test_ampere_arrival": """
        gl.nvidia.ampere.mbarrier.allocate_mbarrier gl.nvidia.ampere.mbarrier.arrive gl.nvidia.ampere.mbarrier.init
        gl.nvidia.ampere.mbarrier.invalidate gl.nvidia.ampere.mbarrier.wait
    """,
    "test_semantics_barriers.py::test_arrival_counts_and_predicates": "gl.nvidia.hopper.mbarrier.arrive",
    "test_semantics_barriers.py::test_asynchronous_store_into_the_peer": "gl.nvidia.hopper.async_store",
    "test_semantics_barriers.py::test_barrier_spellings": "gl.barrier gl.nvidia.hopper.cluster.barrier",
    "test_semantics_control.py::test_aggregates_and_compile_time_functions": "gl.aggregate_replace gl.to_tensor",
    "test_semantics_control.py::test_an_assumption_that_holds_changes_nothing": "gl.assume",
    "test_semantics_control.py::test_atomic_add_of_tensors_with_collisions": "gl.atomic_add",
    "test_semantics_control.py::test_device_assert": "gl.device_assert",
    "test_semantics_control.py::test_device_print": "gl.device_print",
    "test_semantics_control.py::test_early_return": "gl.store",
    "test_semantics_control.py::test_grid_of_three_dimensions": "gl.num_programs gl.program_id",
    "test_semantics_control.py::test_inline_assembly_runs_its_registered_twin": "gl.inline_asm_elementwise",
    "test_semantics_control.py::test_integer_atomics": """
        gl.atomic_and gl.atomic_cas gl.atomic_max gl.atomic_min gl.atomic_or gl.atomic_xchg gl.atomic_xor
    """,
    "test_semantics_control.py::test_masks_and_other": "gl.load",
    "test_semantics_functions.py::test_a_store_as_a_method": "gl.tensor.store",
    "test_semantics_functions.py::test_arithmetic_by_name": "gl.add gl.cast gl.fdiv gl.mul gl.sub gl.tensor.cast",
    "test_semantics_functions.py::test_atomics_as_methods": """
        gl.tensor.atomic_add gl.tensor.atomic_and gl.tensor.atomic_cas gl.tensor.atomic_load gl.tensor.atomic_max
        gl.tensor.atomic_min gl.tensor.atomic_or gl.tensor.atomic_store gl.tensor.atomic_xchg gl.tensor.atomic_xor
    """,
    "test_semantics_functions.py::test_compile_time_operations": """
        gl.bank_conflicts gl.nvidia.ampere.mbarrier.MBarrierLayout.multicta gl.static_assert gl.static_print
        gl.to_linear_layout
    """,
    "test_semantics_functions.py::test_every_shared_atomic": """
        gl.shared_memory_descriptor.atomic_scatter_and gl.shared_memory_descriptor.atomic_scatter_min
        gl.shared_memory_descriptor.atomic_scatter_or gl.shared_memory_descriptor.atomic_scatter_xchg
        gl.shared_memory_descriptor.atomic_scatter_xor
    """,
    "test_semantics_functions.py::test_flip_and_item": "gl.tensor.flip gl.tensor.item",
    "test_semantics_functions.py::test_fp4_to_fp": "gl.fp4_to_fp",
    "test_semantics_functions.py::test_fpsan_ring": "gl.fpsan.unembed",
    "test_semantics_functions.py::test_fpsan_ring_as_compiled": "gl.fpsan.embed",
    "test_semantics_functions.py::test_functions_as_methods": """
        gl.tensor.abs gl.tensor.ceil gl.tensor.cos gl.tensor.erf gl.tensor.exp gl.tensor.exp2 gl.tensor.floor
        gl.tensor.log gl.tensor.log2 gl.tensor.rsqrt gl.tensor.sigmoid gl.tensor.sin gl.tensor.sqrt
        gl.tensor.sqrt_rn
    """,
    "test_semantics_functions.py::test_inline_asm_of_all_registers": "gl.inline_asm",
    "test_semantics_functions.py::test_integer_methods_and_hints": """
        gl.max_constancy gl.max_contiguous gl.multiple_of gl.tensor.cdiv gl.tensor.logical_and gl.tensor.logical_or
    """,
    "test_semantics_functions.py::test_operators_with_a_number_in_front": """
        gl.tensor.__eq__ gl.tensor.__ge__ gl.tensor.__gt__ gl.tensor.__le__ gl.tensor.__lt__ gl.tensor.__ne__
        gl.tensor.__radd__ gl.tensor.__rand__ gl.tensor.__req__ gl.tensor.__rfloordiv__ gl.tensor.__rge__
        gl.tensor.__rgt__ gl.tensor.__rle__ gl.tensor.__rlshift__ gl.tensor.__rlt__ gl.tensor.__rmod__
        gl.tensor.__rmul__ gl.tensor.__rne__ gl.tensor.__ror__ gl.tensor.__rrshift__ gl.tensor.__rsub__
        gl.tensor.__rtruediv__ gl.tensor.__rxor__ gl.tensor.__truediv__
    """,
    "test_semantics_functions.py::test_packed_minimum_and_maximum": """
        gl.nvidia.blackwell.max2 gl.nvidia.blackwell.min2
    """,
    "test_semantics_functions.py::test_reductions_as_methods": """
        gl.reduce_or gl.tensor.max gl.tensor.min gl.tensor.reduce gl.tensor.reduce_or gl.tensor.sum
        gl.tensor.xor_sum gl.xor_sum
    """,
    "test_semantics_functions.py::test_scans_as_methods": """
        gl.tensor.associative_scan gl.tensor.cumprod gl.tensor.cumsum
    """,
    "test_semantics_functions.py::test_shapes_by_name_and_as_methods": """
        gl.broadcast gl.permute gl.ravel gl.reshape gl.tensor.broadcast_to gl.tensor.expand_dims gl.tensor.gather
        gl.tensor.permute gl.tensor.ravel gl.tensor.reshape gl.tensor.split gl.tensor.trans
    """,
    "test_semantics_functions.py::test_tensors_like_another_and_what_changes_nothing": """
        gl.expect_zero gl.full_like gl.num_ctas gl.num_warps gl.zeros_like
    """,
    "test_semantics_functions.py::test_umulhi_of_64_bits": "gl.umulhi",
    "test_semantics_layouts.py::test_associative_scan_of_a_tuple_keeps_the_order": "gl.associative_scan",
    "test_semantics_layouts.py::test_auto_layout": "gl.set_auto_layout",
    "test_semantics_layouts.py::test_convert_layout_keeps_every_element": "gl.convert_layout",
    "test_semantics_layouts.py::test_cumsum_and_cumprod": "gl.cumprod gl.cumsum",
    "test_semantics_layouts.py::test_dot_fma": "gl.dot_fma",
    "test_semantics_layouts.py::test_expand_dims_and_broadcast": "gl.expand_dims gl.tensor.__getitem__",
    "test_semantics_layouts.py::test_gather": "gl.gather",
    "test_semantics_layouts.py::test_histogram": "gl.histogram",
    "test_semantics_layouts.py::test_map_elementwise_loops_for_each_element": "gl.map_elementwise",
    "test_semantics_layouts.py::test_reduce": "gl.max gl.min gl.sum",
    "test_semantics_layouts.py::test_reduce_of_a_tuple_by_a_function_of_the_kernel": "gl.reduce",
    "test_semantics_layouts.py::test_reshape_split_join_permute": "gl.join gl.split",
    "test_semantics_libdevice_integers.py::test_arithmetic_of_integers": """
        gl.extra.libdevice.hadd gl.extra.libdevice.mul24 gl.extra.libdevice.mulhi gl.extra.libdevice.rhadd
    """,
    "test_semantics_libdevice.py::test_arithmetic_rounds_as_asked": """
        gl.extra.libdevice.add_rn gl.extra.libdevice.div_rn gl.extra.libdevice.div_ru gl.extra.libdevice.div_rz
        gl.extra.libdevice.fma_rd gl.extra.libdevice.fma_rn gl.extra.libdevice.fma_ru gl.extra.libdevice.fma_rz
        gl.extra.libdevice.mul_rd gl.extra.libdevice.mul_rn gl.extra.libdevice.mul_ru gl.extra.libdevice.mul_rz
        gl.extra.libdevice.rcp_rd gl.extra.libdevice.rcp_rn gl.extra.libdevice.rcp_ru gl.extra.libdevice.rcp_rz
        gl.extra.libdevice.sub_rd gl.extra.libdevice.sub_rn gl.extra.libdevice.sub_ru gl.extra.libdevice.sub_rz
    """,
    "test_semantics_libdevice.py::test_bessel_functions": """
        gl.extra.libdevice.j0 gl.extra.libdevice.j1 gl.extra.libdevice.jn gl.extra.libdevice.y0
        gl.extra.libdevice.y1 gl.extra.libdevice.yn
    """,
    "test_semantics_libdevice_integers.py::test_bits_as_another_type": """
        gl.extra.libdevice.double2hiint gl.extra.libdevice.double2loint gl.extra.libdevice.double_as_longlong
        gl.extra.libdevice.float_as_int gl.extra.libdevice.float_as_uint gl.extra.libdevice.hiloint2double
        gl.extra.libdevice.int_as_float gl.extra.libdevice.longlong_as_double gl.extra.libdevice.rcp64h
        gl.extra.libdevice.uint_as_float
    """,
    "test_semantics_libdevice_integers.py::test_bits_of_integers": """
        gl.extra.libdevice.abs gl.extra.libdevice.brev gl.extra.libdevice.clz gl.extra.libdevice.ffs
        gl.extra.libdevice.popc
    """,
    "test_semantics_libdevice_integers.py::test_bytes_and_differences": """
        gl.extra.libdevice.byte_perm gl.extra.libdevice.sad
    """,
    "test_semantics_libdevice_integers.py::test_double_to_float_rounds_as_asked": """
        gl.extra.libdevice.double2float_rd gl.extra.libdevice.double2float_rn gl.extra.libdevice.double2float_ru
        gl.extra.libdevice.double2float_rz
    """,
    "test_semantics_libdevice.py::test_fast_functions": """
        gl.extra.libdevice.fast_cosf gl.extra.libdevice.fast_exp10f gl.extra.libdevice.fast_expf
        gl.extra.libdevice.fast_log10f gl.extra.libdevice.fast_log2f gl.extra.libdevice.fast_logf
        gl.extra.libdevice.fast_sinf gl.extra.libdevice.fast_tanf gl.extra.libdevice.rsqrt_rn
        gl.extra.libdevice.saturatef
    """,
    "test_semantics_libdevice_integers.py::test_floats_to_integers": """
        gl.extra.libdevice.double2int_rd gl.extra.libdevice.double2int_ru gl.extra.libdevice.double2int_rz
        gl.extra.libdevice.double2ll_rd gl.extra.libdevice.double2ll_rn gl.extra.libdevice.double2ll_ru
        gl.extra.libdevice.double2ll_rz gl.extra.libdevice.double2uint_rd gl.extra.libdevice.double2uint_rn
        gl.extra.libdevice.double2uint_ru gl.extra.libdevice.double2uint_rz gl.extra.libdevice.double2ull_rd
        gl.extra.libdevice.double2ull_rn gl.extra.libdevice.double2ull_ru gl.extra.libdevice.double2ull_rz
        gl.extra.libdevice.float2int_rd gl.extra.libdevice.float2int_ru gl.extra.libdevice.float2int_rz
        gl.extra.libdevice.float2ll_rd gl.extra.libdevice.float2ll_ru gl.extra.libdevice.float2ll_rz
        gl.extra.libdevice.float2uint_rd gl.extra.libdevice.float2uint_rn gl.extra.libdevice.float2uint_ru
        gl.extra.libdevice.float2uint_rz gl.extra.libdevice.float2ull_rd gl.extra.libdevice.float2ull_rn
        gl.extra.libdevice.float2ull_ru gl.extra.libdevice.float2ull_rz
    """,
    "test_semantics_libdevice.py::test_functions_of_a_float_and_an_integer": """
        gl.extra.libdevice.ldexp gl.extra.libdevice.pow gl.extra.libdevice.scalbn
    """,
    "test_semantics_libdevice.py::test_functions_of_one_float": """
        gl.extra.libdevice.acos gl.extra.libdevice.acosh gl.extra.libdevice.asin gl.extra.libdevice.asinh
        gl.extra.libdevice.atan gl.extra.libdevice.atanh gl.extra.libdevice.cbrt gl.extra.libdevice.ceil
        gl.extra.libdevice.cos gl.extra.libdevice.cosh gl.extra.libdevice.cyl_bessel_i0
        gl.extra.libdevice.cyl_bessel_i1 gl.extra.libdevice.erf gl.extra.libdevice.erfc gl.extra.libdevice.erfcinv
        gl.extra.libdevice.erfcx gl.extra.libdevice.erfinv gl.extra.libdevice.exp gl.extra.libdevice.exp10
        gl.extra.libdevice.exp2 gl.extra.libdevice.expm1 gl.extra.libdevice.floor gl.extra.libdevice.lgamma
        gl.extra.libdevice.log gl.extra.libdevice.log10 gl.extra.libdevice.log1p gl.extra.libdevice.log2
        gl.extra.libdevice.nearbyint gl.extra.libdevice.normcdf gl.extra.libdevice.normcdfinv
        gl.extra.libdevice.rcbrt gl.extra.libdevice.rint gl.extra.libdevice.round gl.extra.libdevice.rsqrt
        gl.extra.libdevice.sin gl.extra.libdevice.sinh gl.extra.libdevice.sqrt gl.extra.libdevice.sqrt_rn
        gl.extra.libdevice.tan gl.extra.libdevice.tanh gl.extra.libdevice.trunc
    """,
    "test_semantics_libdevice.py::test_functions_of_several_floats": """
        gl.extra.libdevice.fast_dividef gl.extra.libdevice.fast_powf gl.extra.libdevice.fma
        gl.extra.libdevice.norm3d gl.extra.libdevice.norm4d gl.extra.libdevice.remainder gl.extra.libdevice.rnorm3d
        gl.extra.libdevice.rnorm4d
    """,
    "test_semantics_libdevice.py::test_functions_of_two_floats": """
        gl.extra.libdevice.atan2 gl.extra.libdevice.copysign gl.extra.libdevice.fdim gl.extra.libdevice.fmod
        gl.extra.libdevice.hypot gl.extra.libdevice.nextafter gl.extra.libdevice.rhypot
    """,
    "test_semantics_libdevice.py::test_gamma": "gl.extra.libdevice.tgamma",
    "test_semantics_libdevice_integers.py::test_integers_to_floats": """
        gl.extra.libdevice.int2double_rn gl.extra.libdevice.int2float_rd gl.extra.libdevice.int2float_rn
        gl.extra.libdevice.int2float_ru gl.extra.libdevice.int2float_rz gl.extra.libdevice.ll2double_rd
        gl.extra.libdevice.ll2double_rn gl.extra.libdevice.ll2double_ru gl.extra.libdevice.ll2double_rz
        gl.extra.libdevice.ll2float_rd gl.extra.libdevice.ll2float_rn gl.extra.libdevice.ll2float_ru
        gl.extra.libdevice.ll2float_rz gl.extra.libdevice.uint2double_rn gl.extra.libdevice.uint2float_rd
        gl.extra.libdevice.uint2float_rn gl.extra.libdevice.uint2float_ru gl.extra.libdevice.uint2float_rz
        gl.extra.libdevice.ull2double_rd gl.extra.libdevice.ull2double_rn gl.extra.libdevice.ull2double_ru
        gl.extra.libdevice.ull2double_rz gl.extra.libdevice.ull2float_rd gl.extra.libdevice.ull2float_rn
        gl.extra.libdevice.ull2float_ru gl.extra.libdevice.ull2float_rz
    """,
    "test_semantics_libdevice_integers.py::test_nan_as_an_integer": """
        gl.extra.libdevice.double2int_rn gl.extra.libdevice.float2int_rn gl.extra.libdevice.float2ll_rn
    """,
    "test_semantics_libdevice.py::test_predicates_and_exponents": """
        gl.extra.libdevice.finitef gl.extra.libdevice.ilogb gl.extra.libdevice.isfinited gl.extra.libdevice.isinf
        gl.extra.libdevice.isnan gl.extra.libdevice.logb gl.extra.libdevice.signbit
    """,
    "test_semantics_libdevice.py::test_roots_round_as_asked": """
        gl.extra.libdevice.sqrt_rd gl.extra.libdevice.sqrt_ru gl.extra.libdevice.sqrt_rz
    """,
    "test_semantics_libdevice.py::test_rounding_at_the_ends": """
        gl.extra.libdevice.add_rd gl.extra.libdevice.add_ru gl.extra.libdevice.add_rz gl.extra.libdevice.div_rd
    """,
    "test_semantics_libdevice_integers.py::test_rounding_to_long_integers": """
        gl.extra.libdevice.llrint gl.extra.libdevice.llround
    """,
    "test_semantics_libdevice.py::test_sines_of_multiples_of_pi": """
        gl.extra.libdevice.cospi gl.extra.libdevice.sinpi
    """,
    "test_semantics_pairs.py::test_barrier_count_is_the_number_of_leaders_that_commit": """
        gl.nvidia.blackwell.tcgen05_mma_barrier_count
    """,
    "test_semantics_shared.py::test_atomic_scatter": """
        gl.shared_memory_descriptor.atomic_scatter_add gl.shared_memory_descriptor.atomic_scatter_max
    """,
    "test_semantics_shared.py::test_cp_async_arrives_on_an_mbarrier": "gl.nvidia.ampere.async_copy.mbarrier_arrive",
    "test_semantics_shared.py::test_cp_async_fills_masked_elements_with_zero": """
        gl.nvidia.ampere.async_copy.async_load gl.nvidia.ampere.async_copy.commit_group
        gl.nvidia.ampere.async_copy.wait_group
    """,
    "test_semantics_shared.py::test_gather_and_scatter": """
        gl.shared_memory_descriptor.gather gl.shared_memory_descriptor.scatter
    """,
    "test_semantics_shared.py::test_index_slice_permute_reshape": """
        gl.shared_memory_descriptor.index gl.shared_memory_descriptor.permute gl.shared_memory_descriptor.reshape
        gl.shared_memory_descriptor.slice
    """,
    "test_semantics_shared.py::test_reinterpret_sees_the_same_bytes": "gl.shared_memory_descriptor.reinterpret",
    "test_semantics_shared.py::test_slices_of_a_padded_layout": "gl.PaddedSharedLayout.with_identity_for",
    "test_semantics_shared.py::test_store_and_load_in_every_layout": """
        gl.allocate_shared_memory gl.shared_memory_descriptor.load gl.shared_memory_descriptor.store
    """,
    "test_semantics_tcgen05.py::test_accumulator_handed_between_roles": """
        gl.nvidia.blackwell.tcgen05_commit gl.warp_specialize
    """,
    "test_semantics_tcgen05.py::test_cluster_launch_control": """
        gl.nvidia.blackwell.clc.clc_result.is_canceled gl.nvidia.blackwell.clc.clc_result.program_id
        gl.nvidia.blackwell.clc.load_result gl.nvidia.blackwell.clc.try_cancel gl.nvidia.hopper.fence_async_shared
    """,
    "test_semantics_tcgen05.py::test_copy_from_shared_to_tensor_memory": "gl.nvidia.blackwell.tcgen05_copy",
    "test_semantics_tcgen05.py::test_left_operand_in_tensor_memory": """
        gl.nvidia.blackwell.tcgen05_mma gl.nvidia.blackwell.tensor_memory_descriptor.reinterpret
        gl.nvidia.blackwell.tensor_memory_descriptor.slice
    """,
    "test_semantics_tcgen05.py::test_load_with_reduction": """
        gl.nvidia.blackwell.tensor_memory_descriptor.load_max gl.nvidia.blackwell.tensor_memory_descriptor.load_min
    """,
    "test_semantics_tcgen05.py::test_packed_arithmetic": """
        gl.nvidia.blackwell.add2 gl.nvidia.blackwell.fma2 gl.nvidia.blackwell.mul2 gl.nvidia.blackwell.sub2
    """,
    "test_semantics_tcgen05.py::test_scaled_mma": "gl.nvidia.blackwell.tcgen05_mma_scaled",
    "test_semantics_tcgen05.py::test_tensor_memory_index_and_initial_value": """
        gl.nvidia.blackwell.allocate_tensor_memory gl.nvidia.blackwell.tensor_memory_descriptor.get_reg_layout
        gl.nvidia.blackwell.tensor_memory_descriptor.index gl.nvidia.blackwell.tensor_memory_descriptor.load
        gl.nvidia.blackwell.tensor_memory_descriptor.store
        gl.nvidia.blackwell.tensor_memory_descriptor_type.get_reg_layout
    """,
    "test_semantics_tma.py::test_descriptor_made_by_the_kernel": "gl.nvidia.hopper.tma.make_tensor_descriptor",
    "test_semantics_tma_blackwell.py::test_gather_of_rows": "gl.nvidia.blackwell.tma.async_gather",
    "test_semantics_im2col.py::test_im2col_is_the_matrix_of_a_convolution": "gl.nvidia.hopper.tma.async_load_im2col",
    "test_semantics_tma.py::test_load_fills_what_is_out_of_bounds_with_zero": """
        gl.nvidia.hopper.mbarrier.expect gl.nvidia.hopper.tma.async_load
    """,
    "test_semantics_tma.py::test_predicates": "gl.full",
    "test_semantics_tma.py::test_reduce_into_global_memory": """
        gl.nvidia.hopper.tma.async_atomic_add gl.nvidia.hopper.tma.async_atomic_and
        gl.nvidia.hopper.tma.async_atomic_max gl.nvidia.hopper.tma.async_atomic_min
        gl.nvidia.hopper.tma.async_atomic_or gl.nvidia.hopper.tma.async_atomic_xor
    """,
    "test_semantics_tma_blackwell.py::test_scatter_of_rows": "gl.nvidia.blackwell.tma.async_scatter",
    "test_semantics_tma.py::test_store_is_clipped": "gl.nvidia.hopper.tma.async_store",
    "test_semantics_tma.py::test_store_wait_for_all_but_the_newest": """
        gl.NVMMASharedLayout.get_default_for gl.nvidia.hopper.tma.store_wait
    """,
    "test_semantics_wgmma.py::test_accumulator_of_a_loop": "gl.nvidia.hopper.warpgroup_mma_init",
    "test_semantics_wgmma.py::test_left_operand_in_registers": "gl.nvidia.hopper.warpgroup_mma",
    "test_semantics_wgmma.py::test_mma_v2": "gl.nvidia.ampere.mma_v2",
    "test_semantics_wgmma.py::test_queue_completes_in_order": "gl.nvidia.hopper.warpgroup_mma_wait gl.zeros",
}

# Operation: why gluon_cpu refuses it. The page lists these too.
REFUSED: dict[str, str] = {
    "gl.nvidia.rubin.add4": "four lanes of fp8 or fp4: an instruction of Rubin",
    "gl.nvidia.rubin.sub4": "four lanes of fp8 or fp4: an instruction of Rubin",
    "gl.nvidia.rubin.mul4": "four lanes of fp8 or fp4: an instruction of Rubin",
    "gl.nvidia.rubin.fma4": "four lanes of fp8 or fp4: an instruction of Rubin",
    "gl.nvidia.rubin.mbarrier.arrive": "an arrival multicast to several CTAs: an instruction of Rubin",
}

# What Triton's own frontend or compiler refuses, on every target.
REFUSED_BY_TRITON = {
    "gl.tensor.advance",
    "gl.tensor.argmax",
    "gl.tensor.argmin",
    "gl.tensor.histogram",
    "gl.tensor.softmax",
    "gl.tensor.sort",
    "gl.tensor.view",
    "gl.nvidia.ampere.async_copy.async_copy_global_to_shared",
    "gl.nvidia.hopper.tma.async_copy_global_to_shared",
    "gl.nvidia.hopper.tma.async_copy_global_to_shared_im2col",
    "gl.nvidia.hopper.tma.async_copy_shared_to_global",
    "gl.extra.libdevice.fast_tanhf",  # AMD's alone
}

# Types, layouts and policies: what operations are told, none themselves.
NO_OPERATION = """
    gl.AutoLayout gl.BlockedLayout gl.CachePolicy gl.CoalescedLayout gl.DistributedLinearLayout gl.DotOperandLayout
    gl.NVMMADistributedLayout gl.NVMMASharedLayout gl.PaddedSharedLayout gl.SharedLinearLayout gl.SliceLayout
    gl.SwizzledSharedLayout gl.base_type gl.base_value gl.bfloat16 gl.block_type gl.constexpr gl.distributed_type
    gl.dtype gl.float16 gl.float32 gl.float64 gl.float8e4b15 gl.float8e4b8 gl.float8e4nv gl.float8e5 gl.float8e5b16
    gl.int1 gl.int16 gl.int32 gl.int64 gl.int8 gl.pointer_type gl.shared_memory_descriptor
    gl.shared_memory_descriptor_type gl.static_range gl.tensor gl.tuple gl.tuple_type gl.uint16 gl.uint32 gl.uint64
    gl.uint8 gl.void gl.nvidia.ampere.CachePolicy gl.nvidia.ampere.FractionalEvictionPolicy
    gl.nvidia.ampere.mbarrier.MBarrierLayout gl.nvidia.hopper.tma.tensor_descriptor
    gl.nvidia.hopper.tma.tensor_descriptor_im2col gl.nvidia.hopper.tma.tensor_descriptor_im2col_type
    gl.nvidia.hopper.tma.tensor_descriptor_type gl.nvidia.blackwell.TensorMemoryLayout
    gl.nvidia.blackwell.TensorMemoryScalesLayout gl.nvidia.blackwell._TensorMemoryLinearLayout
    gl.nvidia.blackwell.tensor_memory_descriptor gl.nvidia.blackwell.tensor_memory_descriptor_type
    gl.nvidia.blackwell.clc.clc_result gl.nvidia.rubin.TensorMemoryScalesLayout
"""


def test_every_operation_is_listed_once():
    lists = [name for names in TESTED.values() for name in names.split()]
    lists += [*REFUSED, *REFUSED_BY_TRITON]
    assert sorted(set(lists)) == sorted(lists), "listed twice"
    offered = set(inventory.offered()[0])
    assert not offered - set(lists), "offered by Triton, and in none of the lists"
    assert not set(lists) - offered, "listed, and no longer offered by Triton"


def test_everything_else_is_listed():
    assert set(inventory.offered()[1]) == set(NO_OPERATION.split())


def test_a_new_operation_would_be_noticed(monkeypatch):
    monkeypatch.setattr(gl, "brand_new", gl.load.__wrapped__, raising=False)
    inventory.offered.cache_clear()
    try:
        assert "gl.brand_new" in inventory.offered()[0]
    finally:
        monkeypatch.undo()
        inventory.offered.cache_clear()


@pytest.mark.parametrize("test", TESTED)
def test_the_named_test_uses_the_operation(test):
    file, function = test.split("::")
    assert function in inventory.tree(inventory.HERE / file), "no such test"
    objects, called = inventory.uses(inventory.HERE / file, function)
    operations = inventory.offered()[0]
    unused = [n for n in TESTED[test].split() if not inventory.is_used(n, operations[n], objects, called)]
    assert not unused, "the test does not use them"


def test_a_test_that_uses_nothing_is_noticed():
    objects, called = inventory.uses(inventory.HERE / "test_semantics_arith.py", "test_fma_rounds_once")
    operations = inventory.offered()[0]
    assert inventory.is_used("gl.fma", operations["gl.fma"], objects, called)
    for name in ("gl.sin", "gl.tensor.histogram", "gl.shared_memory_descriptor.store"):
        assert not inventory.is_used(name, operations[name], objects, called)


# What is refused


@jit
def four_lanes(x_ptr, out_ptr, NAME: gl.constexpr):
    x = load_matrix(x_ptr, 32, 32, MATRIX)
    if NAME == "fma4":
        y = rubin.fma4(x, x, x)
    else:
        y = getattr(rubin, NAME)(x, x)
    store_matrix(out_ptr, y)


@pytest.mark.parametrize("name", ["add4", "sub4", "mul4", "fma4"])
def test_four_lanes(name):
    x, out = normal(32, 32, dtype=torch.float8_e4m3fn), poisoned(32, 32, dtype=torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="packed arithmetic of fp8 or fp4"):
        gluon_cpu.launch(four_lanes, (1,), x, out, NAME=name, target="sm_100a")


@jit
def arrive_in_several(out_ptr):
    barrier = rubin.mbarrier.allocate_mbarrier()
    rubin.mbarrier.init(barrier, count=2)
    gl.barrier(cluster=True)
    rubin.mbarrier.arrive(barrier, multicast_cta=1)
    rubin.mbarrier.wait(barrier, 0)
    gl.store(out_ptr, 1)


def test_arrival_in_several_ctas():
    with pytest.raises((NotImplementedError, RuntimeError), match="multicast"):
        gluon_cpu.launch(arrive_in_several, (1,), poisoned(1), num_ctas=2, target="sm_100a")


@jit
def not_in_gluon(x_ptr, out_ptr, NAME: gl.constexpr):
    i = gl.arange(0, 128, ROW)
    x = gl.load(x_ptr + i)
    if NAME == "advance":
        x.advance([0])
    elif NAME == "argmax":
        x.argmax(0)
    elif NAME == "argmin":
        x.argmin(0)
    elif NAME == "histogram":
        x.to(gl.int32).histogram(128)
    elif NAME == "softmax":
        x.softmax()
    elif NAME == "sort":
        gl.store(out_ptr + i, x.sort())
    elif NAME == "view":
        x.view([128])
    elif NAME == "fast_tanhf":
        gl.store(out_ptr + i, libdevice.fast_tanhf(x))
    elif NAME == "async_copy_global_to_shared_im2col":
        tma.async_copy_global_to_shared_im2col(x_ptr)
    elif NAME == "async_copy_shared_to_global":
        tma.async_copy_shared_to_global(x_ptr)
    elif NAME == "async_copy":
        async_copy.async_copy_global_to_shared(x_ptr)
    else:
        tma.async_copy_global_to_shared(x_ptr)


@pytest.mark.parametrize("name", [*sorted({n.split(".")[-1] for n in REFUSED_BY_TRITON}), "async_copy"])
def test_what_triton_itself_refuses(name):
    with pytest.raises(CompilationError):
        gluon_cpu.launch(not_in_gluon, (1,), normal(128), poisoned(128), NAME=name)


def test_the_page_lists_what_is_refused():
    """One line for each, with its reason; and no other."""
    page = (inventory.HERE.parents[1] / "docs" / "gluon_cpu.md").read_text(encoding="utf-8")
    section = page.split("### Operations that are refused")[1].split("\n## ")[0].split("\n### ")[0]
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.+?) \|$", section, flags=re.MULTILINE))
    assert rows == REFUSED
