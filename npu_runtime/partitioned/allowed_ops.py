"""Which PyTorch ops the host fallback may call: an IR file is data and must not reach files, devices or foreign code.

The rules read an op's schema. An op of PyTorch's own namespaces (``aten``, ``prims``) is allowed if it

* is known to the dispatcher (TorchScript's own ops, such as ``aten::save``, are not),
* writes to no argument, the first one of an in-place op excepted (no ``.out`` overloads),
* takes tensors, numbers, dtypes and the like; text only in arguments that choose among modes,
* takes a tensor, or creates one from numbers alone (``arange``, ``zeros``),
* belongs to no vendor library or packed format, and is not a private op (``aten._name``) that no export makes.

Ops of other namespaces are whatever is registered in the process. They run only if the IR was captured in this process
or the caller of ``load_ir`` named them (``IRGraph.allowed_ops``).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

from npu_compiler.aten.op_names import OWN_NAMESPACES, TEXT_ARGUMENTS
from npu_compiler.support.errors import NPUError

# Types of arguments that carry no reference to anything outside of the call.
_PLAIN = frozenset(
    "Tensor int float bool number complex ScalarType Layout MemoryFormat Device Generator".split()
)  # fmt: skip

# Ops without a tensor argument: they fill a new tensor, or check a number.
_CREATION = frozenset(
    "_assert_scalar arange bartlett_window blackman_window empty empty_permuted empty_strided eye fft_fftfreq "
    "fft_rfftfreq full hamming_window hann_window iota kaiser_window linspace logspace normal ones rand randint randn "
    "randperm range scalar_tensor sym_constrain_range sym_constrain_range_for_size tril_indices triu_indices uniform "
    "zeros".split()
)

_PRIVATE = frozenset(
    "_adaptive_avg_pool2d _adaptive_avg_pool3d _addmm_activation _aminmax _assert_async _assert_scalar "
    "_assert_tensor_metadata _batch_norm_no_update _cdist_forward _chunk_cat _conj _conj_copy _conj_physical "
    "_convolution _convolution_mode _ctc_loss _dim_arange _embedding_bag _embedding_bag_forward_only _euclidean_dist "
    "_fft_c2c _fft_c2r _fft_r2c _fused_rms_norm _functional_assert_async _functional_assert_scalar "
    "_grid_sampler_2d_cpu_fallback _grouped_mm _index_put_impl _index_put_impl_ _int_mm _is_all_true _is_any_true "
    "_linalg_check_errors _linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet _linalg_solve_ex _linalg_svd "
    "_local_scalar_dense _log_softmax _logcumsumexp _lu_with_info _masked_softmax _native_batch_norm_legit_functional "
    "_native_batch_norm_legit_no_training _native_multi_head_attention _neg_view _neg_view_copy _pad_circular "
    "_pad_enum _pdist_forward _prelu_kernel _reshape_copy _safe_softmax _scaled_dot_product_attention_math "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_mm _shape_as_tensor _softmax _stack _thnn_fused_gru_cell "
    "_thnn_fused_lstm_cell _to_copy _transform_bias_rescale_qkv _transformer_encoder_layer_fwd _trilinear _unique "
    "_unique2 _unsafe_index _unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate _unsafe_view "
    "_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_lanczos2d_aa _upsample_nearest_exact1d "
    "_upsample_nearest_exact2d _upsample_nearest_exact3d _weight_norm _weight_norm_interface".split()
)

# Vendor libraries and packed formats take tensors that hold addresses or trust their layout; so do the ops below.
_FOREIGN = ("cudnn_", "fbgemm_", "miopen_", "mkldnn_", "quantized_", "sparse_")
_UNCHECKED = frozenset("record_stream segment_reduce set set_ to_mkldnn".split())


class ForbiddenOp(NPUError):
    """Raised for an op that the fallback does not call; the text says why."""


def check_allowed(op: Any, op_type: str, allowed_ops: Collection[str]) -> None:
    """Raise ``ForbiddenOp`` unless the overload ``op`` may run; ``allowed_ops`` are those of the IR."""
    namespace = op_type.partition(".")[0]
    if namespace not in OWN_NAMESPACES:
        if op_type not in allowed_ops:
            advice = (
                "if you trust the file and the library that registers it, pass load_ir or npu_runtime.load "
                f"allowed_ops=[{op_type!r}]"
            )
            raise ForbiddenOp(f"{op_type} is not an op of PyTorch, and an IR file may not call others; {advice}")
    elif objection := _objection(op):
        raise ForbiddenOp(f"{op_type} is not among the ops that IR may call: {objection}")


@cache
def _objection(op: Any) -> str:
    """Return why the rules forbid an op of PyTorch's own, or ''."""
    import torch

    schema = op._schema
    name = schema.name.partition("::")[2]
    if not torch._C._dispatch_has_kernel(op.name()):
        return "it is an op of TorchScript"
    if name.startswith(_FOREIGN) or name in _UNCHECKED:
        return "it belongs to a library or format that trusts its arguments"
    if name.startswith("_") and not name.startswith(("__", "_foreach_")) and name not in _PRIVATE:
        return "it is private to PyTorch"
    for i, argument in enumerate(schema.arguments):
        written = argument.alias_info is not None and argument.alias_info.is_write
        in_place = i == 0 and (name.endswith("_") or name.startswith("__i"))
        if written and not in_place:
            return f"it writes to its argument {argument.name!r}"
        if not _harmless(argument):
            return f"its argument {argument.name!r} is a {argument.type}"
    takes_tensor = any("Tensor" in str(a.type) for a in schema.arguments)
    return "" if takes_tensor or name in _CREATION else "it takes no tensor"


def _harmless(argument: Any) -> bool:
    kind = str(argument.real_type)
    for wrapper in ("Optional[", "List[", "Optional["):
        if kind.startswith(wrapper):
            kind = kind[len(wrapper) : -1]
    return kind in _PLAIN or (kind == "str" and argument.name in TEXT_ARGUMENTS)
