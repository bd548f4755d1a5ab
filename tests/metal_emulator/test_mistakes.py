"""The Metal emulator catches what kernels must not do."""

from __future__ import annotations

import numpy as np
import pytest

from npu_compiler.support.errors import ToolchainError

from . import ORDERS, EmulatorError, Library, MSLError, Window, translate

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"

BAD = (
    HEAD
    + r"""
#define KERNEL(name) kernel void name(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], \
                 uint i [[thread_index_in_threadgroup]], uint g [[threadgroup_position_in_grid]])
KERNEL(reads_past_the_end) { y[i] = x[i + 1]; }
KERNEL(reads_before_the_start) { y[i] = x[i - 1u]; }
KERNEL(writes_past_the_end) { y[i] = x[i]; if (i == 63) y[64] = 1; }
KERNEL(reads_a_wild_address) { y[i] = x[long(i + 1) << 40]; }
KERNEL(passes_a_threadgroup_array) { threadgroup float s[64]; s[i + 1] = x[i]; y[i] = x[i]; }
KERNEL(passes_a_thread_array) { float a[4] = {1, 2, 3, 4}; y[i] = a[int(x[i]) + 4]; }
KERNEL(reads_unwritten_memory) {
  threadgroup float s[64];
  if (i < 32) s[i] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = s[i];
}
KERNEL(forgets_a_barrier) { threadgroup float s[64]; s[i] = x[i]; y[i] = s[i ^ 1]; }
KERNEL(writes_after_reading) {
  threadgroup float s[64];
  s[i] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float a = s[i ^ 1];
  s[i] = a;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = s[i];
}
KERNEL(has_a_barrier_for_device_memory_only) {
  threadgroup float s[64];
  s[i] = x[i];
  threadgroup_barrier(mem_flags::mem_device);
  y[i] = s[i ^ 1];
}
KERNEL(has_a_barrier_for_threadgroup_memory_only) {
  y[i] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = y[i ^ 1];
}
KERNEL(synchronises_its_simdgroup_only) {
  threadgroup float s[64];
  s[i] = x[i];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = s[i ^ 32];
}
KERNEL(races_between_groups) { if (i == g) y[0] = x[i]; }
KERNEL(reads_what_another_group_writes) { if (i < 32) y[g * 32 + i] = y[(g ^ 1) * 32 + i]; }
KERNEL(leaves_before_a_barrier) {
  if (i >= 40) return;
  threadgroup_barrier(mem_flags::mem_device);
  y[i] = 1;
}
KERNEL(waits_at_two_barriers) {
  if (i & 1) threadgroup_barrier(mem_flags::mem_device);
  else threadgroup_barrier(mem_flags::mem_device);
  y[i] = 1;
}
inline void meet() { threadgroup_barrier(mem_flags::mem_device); }
KERNEL(waits_at_two_barriers_in_a_function) {
  if (i & 1) meet();
  else meet();
  y[i] = 1;
}
KERNEL(sums_in_a_branch) { y[i] = 0; if (i & 1) y[i] = simd_sum(x[i]); }
KERNEL(shuffles_from_nobody) { y[i] = simd_shuffle(x[i], 32); }
KERNEL(is_misaligned) { y[i] = ((device const float4*)(x + 1))[0].x; }
KERNEL(divides_by_zero) { y[i] = float(int(i) / int(x[i])); }
KERNEL(takes_too_much_memory) { threadgroup float s[9000]; s[i] = x[i]; y[i] = s[i]; }
KERNEL(loops_without_a_meeting_point) { for (uint k = 0; k < i; k++) threadgroup_barrier(mem_flags::mem_device); }
#define FENCE atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device)
#define LAST(name, space, before, barrier, after) \
kernel void name(space float* x [[buffer(0)]], device float* y [[buffer(1)]], device atomic_int* count [[buffer(2)]], \
                 uint i [[thread_index_in_threadgroup]], uint g [[threadgroup_position_in_grid]]) { \
  threadgroup int last[1]; \
  x[g * 64 + i] = float(i + g); \
  threadgroup_barrier(mem_flags::barrier | mem_flags::mem_threadgroup); \
  if (i == 0) { \
    before; \
    last[0] = atomic_fetch_add_explicit(count, 1, memory_order_relaxed); \
    after; \
  } \
  threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup); \
  if (last[0] == 3) y[i] = x[i] + x[64 + i] + x[128 + i] + x[192 + i]; \
}
LAST(last_sums, coherent(device) device, FENCE, mem_device, FENCE)
LAST(last_publishes_nothing, coherent(device) device, (void)0, mem_device, FENCE)
LAST(last_acquires_nothing, coherent(device) device, FENCE, mem_device, (void)0)
LAST(last_waits_for_one_thread, coherent(device) device, FENCE, mem_none, FENCE)
LAST(last_is_not_coherent, device, FENCE, mem_device, FENCE)
KERNEL(is_fine) { y[i + g * 64] = x[i] + 1; }
"""
)


def line_of(text: str) -> int:
    """The line of BAD that holds ``text``."""
    return BAD[: BAD.index(text)].count("\n") + 1


MISTAKES = {
    "reads_past_the_end": r"read of 4 bytes outside every buffer: byte 256 \(element 64\) of x \[\[buffer\(0\)\]\]",
    "reads_before_the_start": "read of 4 bytes (at a wild address|outside every buffer)",
    "writes_past_the_end": r"write of 4 bytes outside every buffer: byte 256 \(element 64\) of y",
    "reads_a_wild_address": "read of 4 bytes at a wild address",
    "passes_a_threadgroup_array": "write of 4 bytes outside threadgroup memory: byte 256 of s, which has 256",
    "passes_a_thread_array": "index 4 is outside the array",
    "reads_unwritten_memory": "element 32 of threadgroup memory s is read before any thread has written it",
    "forgets_a_barrier": "element 1 of threadgroup memory s is read before|data race: element",
    "writes_after_reading": "data race: element .* of threadgroup memory s was .* with no barrier between",
    "has_a_barrier_for_device_memory_only": "data race: element .* of threadgroup memory s",
    "has_a_barrier_for_threadgroup_memory_only": "data race: element .* of y",
    "synchronises_its_simdgroup_only": "element 32 of threadgroup memory s is read before|data race: element",
    "races_between_groups": "data race: element 0 of y .* was written by group 0, and group 1 writes it",
    "reads_what_another_group_writes": "data race: element .* of y .* in the same launch",
    "leaves_before_a_barrier": "threadgroup_barrier is reached by 40 of 64 threads",
    "waits_at_two_barriers": "threads of one group wait at different barriers: "
    f"line {line_of('else threadgroup')} and line {line_of('else threadgroup') - 1}",
    "waits_at_two_barriers_in_a_function": "threads of one group wait at different barriers",
    "sums_in_a_branch": f"line {line_of('y[i] = simd_sum')}: simd_sum is reached by part of simdgroup 0 only",
    "shuffles_from_nobody": "reads lane 32, which takes no part",
    "is_misaligned": "an address is not a multiple of 16 bytes",
    "divides_by_zero": f"line {line_of('int(i) / int')}: integer division by zero",
    "takes_too_much_memory": "36000 bytes of threadgroup memory; Metal has 32768",
    "loops_without_a_meeting_point": "threadgroup_barrier is reached by 63 of 64 threads",
}


@pytest.fixture(scope="module")
def bad() -> Library:
    return Library(BAD)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_caught(bad: Library, name: str) -> None:
    groups = (2,) if name in ("races_between_groups", "reads_what_another_group_writes") else (1,)
    x, y = np.zeros(64, np.float32), np.zeros(64, np.float32)
    with pytest.raises(EmulatorError, match=f"{name}: .*({MISTAKES[name]})"):
        bad[name]({0: x, 1: y}, groups, (64,))
    for order in ORDERS[1:]:
        with pytest.raises(EmulatorError, match=name):
            bad[name]({0: x, 1: y}, groups, (64,), order=order)
    bad["is_fine"]({0: x, 1: y}, (1,), (64,))  # a failed launch leaves nothing behind
    assert (y == 1).all()


@pytest.mark.parametrize("order", ORDERS)
def test_fences_and_an_atomic_order_groups(bad: Library, order: str) -> None:
    """The last group reads what the others wrote; without either fence, the barrier or the qualifier it is a race."""
    for name in ("last_sums", "publishes_nothing", "acquires_nothing", "waits_for_one_thread", "is_not_coherent"):
        x, y, count = np.zeros((4, 64), np.float32), np.zeros(64, np.float32), np.zeros(1, np.int32)
        arguments = ({0: x, 1: y, 2: count}, (4,), (64,))
        if name == "last_sums":
            bad[name](*arguments, order=order)
            np.testing.assert_array_equal(y, 4 * np.arange(64) + 6)
        else:
            with pytest.raises(EmulatorError, match=r"data race: element .* of x .* in the same launch"):
                bad[f"last_{name}"](*arguments, order=order)


def test_divergent_simdgroup_functions_can_be_allowed(bad: Library) -> None:
    """They are legal in Metal, but not on every GPU that runs the same kernels."""
    y = np.zeros(64, np.float32)
    bad["sums_in_a_branch"]({0: np.ones(64, np.float32), 1: y}, (1,), (64,), divergent=True)
    np.testing.assert_array_equal(y, np.arange(64) % 2 * 16)


def test_launches_that_metal_would_refuse(bad: Library) -> None:
    x, y = np.zeros(64, np.float32), np.zeros(64, np.float32)
    fine = bad["is_fine"]
    for buffers, groups, threads, message in (
        ({0: x, 1: y}, (1,), (1025,), "1025 threads in a group; 1 to 1024"),
        ({0: x, 1: y}, (0,), (64,), "wants at least one"),
        ({0: x}, (1,), (64,), r"nothing is bound to y \[\[buffer\(1\)\]\]"),
        ({0: x, 1: y, 2: x}, (1,), (64,), r"the kernel has no \[\[buffer\(2\)\]\]"),
        ({0: x, 1: y[::2]}, (1,), (64,), "not contiguous"),
        ({0: x, 1: y.tobytes()}, (1,), (64,), "setBytes serves constants"),
    ):
        with pytest.raises(EmulatorError, match=message):
            fine(buffers, groups, threads)


def test_a_window_bounds_what_a_kernel_may_touch(bad: Library) -> None:
    x, y = np.zeros(64, np.float32), np.zeros(128, np.float32)
    bad["is_fine"]({0: x, 1: Window(y.ctypes.data, 256)}, (1,), (64,))
    with pytest.raises(EmulatorError, match=r"byte 256 \(element 64\) of y"):
        bad["is_fine"]({0: x, 1: Window(y.ctypes.data, 256)}, (2,), (64,))


SPACES = """kernel void k(device float* d [[buffer(0)]], constant float* c [[buffer(1)]],
  uint i [[thread_index_in_threadgroup]]) {{ threadgroup float t[8]; float p[8];
  {} }}"""


@pytest.mark.parametrize(
    "body",
    [
        "device float* q = t; q[0] = 1;",
        "threadgroup float* q = d; q[0] = 1;",
        "thread float* q = d; q[0] = 1;",
        "device float* q = c; q[0] = 1;",
        "constant float* q = d; d[0] = q[0];",
        "c[i] = d[i];",
        "threadgroup float* q = p; q[0] = 1;",
        "device const float* q = d; q[0] = 1;",
        "device half* q = d; q[0] = 1;",
        "device float* q = (device float*)t; q[0] = 1;",
        "coherent(device) device float* q = d; q[0] = 1;",
        "atomic_fetch_add_explicit((device atomic_int*)d, 1, memory_order_seq_cst);",
        "bfloat x = d[0]; d[1] = x;",
        "d[0] = exp(i);",
        "d[0] = max(d[1], 0);",
        "d[0] = simd_sum(bfloat(d[0]));",
        "d[0] = float(simd_sum(ulong(i)));",
        "d[0] = erf(d[0]);",
        "float3 v = float3(1, 2); d[0] = v.x;",
        "simdgroup_half8x8 m; simdgroup_load(m, d);",
        "d[0] = as_type<half>(d[0]);",
    ],
)
def test_type_and_address_space_mistakes_do_not_compile(body: str) -> None:
    with pytest.raises(ToolchainError, match="kernel:5:"):
        Library(HEAD + SPACES.format(body))


def test_address_spaces_that_fit_compile() -> None:
    body = "thread float* q = p; q[0] = c[0]; threadgroup float* s = &t[1]; device const float* r = d; t[1] = q[0];"
    body += "d[1] = s[0] + *r;"
    d = np.ones(2, np.float32)
    Library(HEAD + SPACES.format(body))["k"]({0: d, 1: np.full(1, 4, np.float32)}, (1,), (1,))
    np.testing.assert_array_equal(d, [1, 5])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("kernel void k(device float* a [[buffer(0)]]) { double x = 1; }", "k.metal:1: there is no double"),
        ("\n\nkernel void k(float* a [[buffer(0)]]) {}", "k.metal:3: k: a needs exactly one address space"),
        ("kernel void k(device float* a) {}", "needs exactly one attribute"),
        ("kernel void k(device float* a [[buffer(31)]]) {}", "indices 0 to 30"),
        ("kernel void k(device float* a [[buffer(0)]], device int* b [[buffer(0)]]) {}", "serves two parameters"),
        ("kernel void k(threadgroup float* a [[buffer(0)]]) {}", "is in threadgroup memory"),
        ("kernel int k(device float* a [[buffer(0)]]) {}", "a kernel must return void"),
        (
            "kernel void k(uint2 a [[thread_position_in_grid]], uint b [[threadgroup_position_in_grid]]) {}",
            "must agree in their number of components",
        ),
        ("kernel void k(float a [[thread_position_in_grid]]) {}", "must be ushort, uint or a vector"),
        ("kernel void k(uint a [[instance_id]]) {}", "unknown attribute instance_id"),
        ("void f(float* a) {}", "a pointer to float without an address space"),
        ("void f() { threadgroup float x[4]; }", "only in a kernel's own body"),
        ("kernel void k(uint i [[thread_position_in_grid]]) { threadgroup int x = 1; }", "initialisers"),
        ("void f() { device float x; }", "cannot stand in device memory"),
        ("void f() { long long x; }", "no long long"),
        ("void f() { long x = 1LL; }", "no long long"),
        ("void f(device float** a) {}", "pointer to a pointer"),
        ("template <int N> void f() { if constexpr (N > 1) return; }", "C.*17"),
        ("vertex void f() {}", "graphics"),
        ("#include <iostream>", "not in the subset"),
        ("coherent(system) device int* x;", "not in the subset: coherent"),
        ("void f() { coherent(device) device int x; }", "only pointers are coherent"),
        ("kernel void k(coherent(device) constant int* a [[buffer(0)]]) {}", "cannot be coherent"),
        ("void f() { __syncthreads(); }", "that is CUDA"),
    ],
)
def test_text_outside_the_subset(source: str, message: str) -> None:
    with pytest.raises(MSLError, match=message):
        translate(source, "k.metal")


def test_coherent_pointers_came_with_metal_3_2() -> None:
    source = "void f(coherent(device) device int* x) { x[0] = 1; }"
    assert "coherent_space" in translate(source, "k.metal", 320).text
    with pytest.raises(MSLError, match=r"coherent came with Metal 3\.2"):
        translate(source, "k.metal", 310)
