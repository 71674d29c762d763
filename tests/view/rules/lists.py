"""What torch can be asked of a tensor, and who answers for a batch: the lists of test_audit.py."""

# No rule: gathered and computed whole, which is always right.
GATHERS = {
    "torch": """
addbmm addr affine_grid_generator argwhere autocast
batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats
batch_norm_gather_stats_with_counts batch_norm_stats batch_norm_update_stats binary_cross_entropy_with_logits
bincount ccol_indices_copy choose_qparams_optimized col_indices_copy combinations convolution corrcoef
cosine_embedding_loss cov crow_indices_copy ctc_loss dequantize diag diagflat diagonal_scatter
dist embedding embedding_bag
expand_copy fbgemm_linear_fp16_weight fbgemm_linear_fp16_weight_fp32_activation fbgemm_linear_int8_weight
fbgemm_linear_int8_weight_fp32_activation fbgemm_linear_quantize_weight fbgemm_pack_gemm_matrix_fp16
fbgemm_pack_quantized_matrix frobenius_norm fused_moving_avg_obs_fake_quant grid_sampler grid_sampler_2d
grid_sampler_3d hash_tensor hinge_embedding_loss histc histogram histogramdd hspmm indices_copy instance_norm
int_repr is_distributed is_nonzero kl_div kron lobpcg lu_unpack margin_ranking_loss masked_scatter masked_select
miopen_batch_norm miopen_convolution miopen_convolution_add_relu miopen_convolution_relu
miopen_convolution_transpose miopen_depthwise_convolution miopen_rnn native_batch_norm native_dropout
native_group_norm native_layer_norm native_norm nonzero nonzero_static norm_except_dim nuclear_norm ormqr
poisson_nll_loss put q_per_channel_axis q_per_channel_scales q_per_channel_zero_points q_scale q_zero_point
quantize_per_channel quantize_per_tensor quantize_per_tensor_dynamic quantized_batch_norm quantized_gru_cell
quantized_lstm_cell quantized_max_pool1d quantized_max_pool2d quantized_max_pool3d quantized_rnn_relu_cell
quantized_rnn_tanh_cell row_indices_copy select_scatter slice_copy slice_inverse slice_scatter smm sspaddmm sym_float
sym_ite sym_max sym_min
sym_not sym_sqrt sym_sum take trace triplet_margin_loss values_copy vdot view_copy
    """,
    "torch.Tensor": """
__array__ __array_wrap__ __bool__ __complex__ __contains__ __cuda_array_interface__ __deepcopy__ __dlpack__
__dlpack_device__
__float__ __format__ __index__ __int__ __long__ __nonzero__ __reduce_ex__ __repr__ __reversed__ __setstate__
_autocast_to_full_precision _autocast_to_reduced_precision _backward_hooks _cdata
_clear_non_serializable_cached_data _coalesced_ _dimI _dimV _grad _grad_fn _indices _nested_tensor_size
_nested_tensor_storage_offsets _nested_tensor_strides _nnz _post_accumulate_grad_hooks _sparse_mask_projection
_to_dense _values addbmm addbmm_ addr addr_ apply_ argwhere as_strided_ bincount
ccol_indices coalesce col_indices corrcoef cov crow_indices cumprod_ cumsum_ dense_dim dequantize diag diagflat
diagonal_scatter dist fill_diagonal_ grad_dtype hash_tensor histc histogram index indices int_repr ipu is_coalesced
is_distributed
is_nonzero item kron map2_ map_ masked_scatter masked_scatter_ masked_select module_load mtia name nonzero
nonzero_static numpy ormqr put put_ q_per_channel_axis q_per_channel_scales q_per_channel_zero_points q_scale
q_zero_point qscheme resize resize_ resize_as resize_as_ resize_as_sparse_ row_indices select_scatter slice_inverse
slice_scatter smm sparse_dim sparse_mask sparse_resize_ sparse_resize_and_clear_ sspaddmm storage storage_type
sum_to_size take to_dense
to_mkldnn to_sparse tolist trace unique unique_consecutive values vdot volatile
    """,
    "torch.functional": """
block_diag cartesian_prod chain_matmul meshgrid pca_lowrank svd_lowrank unique unique_consecutive unravel_index
    """,
    "torch.linalg": """
lstsq multi_dot tensorinv tensorsolve vander
    """,
    "torch.nn.functional": """
_sym_int affine_grid embedding_bag fractional_max_pool2d fractional_max_pool2d_with_indices
fractional_max_pool3d fractional_max_pool3d_with_indices linear_cross_entropy pdist
    """,
}

# Of what torch says may not be overridden:
# takes no tensor, or nothing of one but what the whole batch says of itself.
HARMLESS = """
Generator _TensorMeta __delattr__ __get__ __getattribute__ __init__ __init_subclass__ __new__ __setattr__
__subclasshook__ __torch_function__ _disabled_torch_dispatch_impl _functional_sym_constrain_range
_has_torch_function _has_torch_function_unary _has_torch_function_variadic _make_dep_token _none_or_dtype
are_deterministic_algorithms_enabled assert_int_or_pair autocast_decrement_nesting autocast_increment_nesting
bartlett_window blackman_window bool boolean_dispatch broadcast_shapes calculate_gain can_cast
clear_autocast_cache cudnn_is_acceptable device dtype empty empty_permuted empty_quantized empty_strided
enable_grad eye fft_fftfreq fft_rfftfreq finfo fork from_file frombuffer get_autocast_cpu_dtype get_autocast_dtype
get_autocast_gpu_dtype get_autocast_ipu_dtype get_autocast_xla_dtype get_default_device get_default_dtype
get_deterministic_debug_mode get_device_module get_float32_matmul_precision get_num_interop_threads
get_num_threads get_rng_state hamming_window handle_torch_function hann_window iinfo import_ir_module
import_ir_module_from_buffer inference_mode init_num_threads initial_seed is_anomaly_check_nan_enabled
is_anomaly_enabled is_autocast_cache_enabled is_autocast_cpu_enabled is_autocast_enabled is_autocast_ipu_enabled
is_autocast_xla_enabled is_deterministic_algorithms_warn_only_enabled is_grad_enabled is_inference_mode_enabled
is_storage is_vulkan_available is_warn_always_enabled kaiser_window layout load manual_seed memory_format
merge_type_from_type_comment no_grad ones parse_ir parse_schema parse_type_comment promote_types qscheme rand
randint randn randperm register_dataclass seed set_anomaly_enabled set_autocast_cache_enabled
set_autocast_cpu_dtype set_autocast_cpu_enabled set_autocast_dtype set_autocast_enabled set_autocast_gpu_dtype
set_autocast_ipu_dtype set_autocast_ipu_enabled set_autocast_xla_dtype set_autocast_xla_enabled set_default_device
set_default_tensor_type set_deterministic_debug_mode set_float32_matmul_precision set_flush_denormal
set_grad_enabled set_num_interop_threads set_num_threads set_printoptions set_rng_state set_warn_always
sym_constrain_range sym_constrain_range_for_size sym_fresh_size thread_safe_generator tril_indices triu_indices
typename unify_type_list use_deterministic_algorithms wait zeros
"""
# Below the functions that scripts call; called with a batch, they end at the net (`__torch_dispatch__`).
INNER = """
_addmm_activation _canonical_mask _dtensor__new__ as_subclass _fix_weakref _make_subclass _make_wrapper_subclass
_philox_normal_ _philox_uniform_ _rev_view_func_unsafe _use_count _view_func _view_func_unsafe
cudnn_affine_grid_generator cudnn_batch_norm cudnn_convolution cudnn_convolution_add_relu cudnn_convolution_relu
cudnn_convolution_transpose cudnn_grid_sampler grouped_mm miopen_ctc_loss mkldnn_adaptive_avg_pool2d
mkldnn_convolution mkldnn_linear_backward_weights mkldnn_max_pool2d mkldnn_max_pool3d mkldnn_rnn_layer
scaled_grouped_mm scaled_mm
"""
# Only raises: removed from torch.
GONE = """
eig lstsq reinforce solve symeig
"""

# Functions of functions: plain/transforms.py.
TRANSFORMS = """
compile cond vmap
"""

# The lists above are of torch 2.13. What there is besides in some other version that duoka works with:
GATHERS["torch.Tensor"] += """
_has_grad_dtype_override _update_names align_as align_to has_names refine_names rename rename_
"""
GATHERS["torch.linalg"] += "matrix_sqrth polar"
GATHERS["torch.foreach"] = """
abs abs_ acos acos_ add add_ addcdiv addcdiv_ addcmul addcmul_ asin asin_ atan atan_ ceil ceil_ clamp_max clamp_max_
clamp_min clamp_min_ clone copy_ cos cos_ cosh cosh_ div div_ erf erf_ erfc erfc_ exp exp_ expm1 expm1_ floor floor_
frac frac_ lerp lerp_ lgamma lgamma_ log log10 log10_ log1p log1p_ log2 log2_ log_ max maximum maximum_ minimum
minimum_ mm mul mul_ neg neg_ norm pow pow_ reciprocal reciprocal_ round round_ rsqrt rsqrt_ sigmoid sigmoid_ sign
sign_ sin sin_ sinh sinh_ sqrt sqrt_ sub sub_ tan tan_ tanh tanh_ trunc trunc_ zero_
"""
HARMLESS += "__annotate__ read_vitals set_vital vitals_enabled"
INNER += "_philox_randint_ scaled_addmm scaled_addmm_"
GONE += "cholesky qr"

# What not every version has: not yet, or no longer.
NOT_IN_ALL = """
torch.Tensor._has_grad_dtype_override torch.Tensor._update_names torch.Tensor.align_as torch.Tensor.align_to
torch.Tensor.cholesky torch.Tensor.has_names torch.Tensor.qr torch.Tensor.refine_names torch.Tensor.rename
torch.Tensor.rename_ torch.cholesky torch.foreach torch.linalg.matrix_sqrth torch.linalg.polar
torch.nn.functional.linear_cross_entropy torch.qr
__annotate__ _philox_normal_ _philox_randint_ _philox_uniform_ align_tensors cholesky miopen_ctc_loss qr read_vitals
scaled_addmm scaled_addmm_ set_vital thread_safe_generator vitals_enabled
"""
