"""The vector layer, transposition and thread pool of the CPU kernels."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ...support.kernel_driver import AMX, ARCHS, CXX, NUMPY, Library, build, entry, struct

pytestmark = pytest.mark.skipif(CXX is None, reason="no g++ on this machine")


# ------------------------------------------------------------------------------------------ transpose, conversions
@pytest.mark.parametrize("arch", ARCHS)
def test_transpose(tmp_path: Path, arch: str) -> None:
    shapes = [(2, 3, 300), (1, 64, 49), (2, 49, 64), (1, 70, 131), (3, 5, 17), (1, 16, 16), (1, 200, 4), (1, 1, 9)]
    types = {"uint8_t": np.uint8, "f16": np.uint16, "float": np.uint32, "int64_t": np.uint64}
    bodies = [
        struct(f"D{i}", B=b, M=m, N=n, in_b=m * n, in_m=n, out_b=m * n, out_n=m) for i, (b, m, n) in enumerate(shapes)
    ]
    for i in range(len(shapes)):
        bodies += [
            entry(f"turn{i}_{t}", f"transpose<D{i}>((const {t}*)a.x, ({t}*)a.out, th, a.counters);") for t in types
        ]
    library = build(tmp_path, arch, bodies, [])
    rng = np.random.default_rng(6)
    for threads in (1, 3):
        library.start(threads)
        for i, (b, m, n) in enumerate(shapes):
            for name, dtype in types.items():
                x = rng.integers(0, np.iinfo(dtype).max, (b, m, n), dtype)
                out = library.run(f"turn{i}_{name}", x, out=np.zeros((b, n, m), dtype))
                assert np.array_equal(out, x.transpose(0, 2, 1)), (shapes[i], name)
    library.handle.stop()


@pytest.mark.parametrize("arch", [*ARCHS, AMX])
def test_conversions(tmp_path: Path, arch: str) -> None:
    """Narrow floats widen exactly; float rounds to nearest even as numpy does; tails touch nothing else. Quantised
    results are clamped, and NaN gives the lowest one."""
    bodies = []
    for source, target in (
        ("f16", "float"),
        ("bf16", "float"),
        ("e4m3", "float"),
        ("float", "e4m3"),
        ("float", "f16"),
        ("float", "bf16"),
        ("float", "int32_t"),
        ("int8_t", "float"),
        ("uint8_t", "float"),
    ):
        step = f"cvt<vec<{target}>>(ld(x + i, n))"
        two = f"st(y + i, {step}, FirstOfTwo{{{{}}, &first}}); i += VL; st(y + i, {step}, SecondOfTwo{{{{}}, &first}})"
        pairs = f"{{ Full n; vf first; for (; i + 4 * VL <= a.keys; i += VL) {{ {two}; }} }}"
        pairs = f"\n#if NPU_PAIRED_STORES\n{pairs}\n#endif\n" if target == "bf16" else ""
        bodies.append(
            entry(
                f"from_{source}_to_{target}",
                f"const {source}* x = (const {source}*)a.x; {target}* y = ({target}*)a.out; long i = 0;{pairs}"
                f"{{ Full n; for (; i + VL <= a.keys; i += VL) st(y + i, {step}, n); }}"
                f"if (i < a.keys) {{ int n = (int)(a.keys - i); st(y + i, {step}, n); }}"
                f"st1(y + a.keys, (scalar<{target}>)ld1(x));",
            )
        )
    clamps = ((0, 0), (3, 0), (128, 131))  # zero point, lowest result
    for zero, low in clamps:
        one, first, second = (
            f"st_quantized(y + i, ld(x + i, n), {zero}, {low}, {lanes}); i += VL;"
            for lanes in ("n", "FirstOfTwo{{}, &first}", "SecondOfTwo{{}, &first}")
        )
        bodies.append(
            entry(
                f"quantize_{zero}_{low}",
                f"const float* x = (const float*)a.x; uint8_t* y = (uint8_t*)a.out; long i = 0;"
                f"\n#if NPU_PAIRED_STORES\n"
                f"{{ Full n; vf first; while (i + 4 * VL <= a.keys) {{ {first} {second} }} }}\n#endif\n"
                f"{{ Full n; while (i + VL <= a.keys) {{ {one} }} }}"
                f"if (i < a.keys) {{ int n = (int)(a.keys - i); {one} }}",
            )
        )
    library = build(tmp_path, arch, bodies, [])
    library.start(1)

    def convert(x: np.ndarray, source: str, target: str, dtype: type) -> np.ndarray:
        y = np.zeros(x.size + 2, dtype)
        library.run(f"from_{source}_to_{target}", x, out=y, keys=x.size)
        assert y[-1] == 0
        np.testing.assert_array_equal(y[-2], y[0])
        return y[:-2]

    rng = np.random.default_rng(7)
    patterns = np.arange(1 << 16, dtype=np.uint16)[:-3]
    floats = np.concatenate(
        [
            rng.integers(0, 1 << 32, 200003, np.uint32).view(np.float32),
            (rng.standard_normal(200003) * 10.0 ** rng.integers(-9, 6, 200003)).astype(np.float32),
            np.array(
                [0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.99, 65520, 2.0**-24, 2.0**-25, 3e-8], np.float32
            ),
        ]
    )
    with np.errstate(over="ignore", invalid="ignore"):
        for name in ("f16", "bf16"):
            halves = patterns.view(NUMPY[name])
            np.testing.assert_array_equal(convert(halves, name, "float", np.float32), halves.astype(np.float32))
            rounded = convert(floats, "float", name, np.uint16).view(NUMPY[name])
            np.testing.assert_array_equal(rounded.astype(np.float32), floats.astype(NUMPY[name]).astype(np.float32))
        codes = np.arange(255, dtype=np.uint8).view(NUMPY["e4m3"])  # the last one is NaN, too
        numbers = codes.astype(np.float32)
        np.testing.assert_array_equal(convert(codes, "e4m3", "float", np.float32), numbers)
        between = (numbers[:126] + numbers[1:127]) / 2
        near = np.concatenate([floats, between, np.nextafter(between, np.float32(0)), np.float32([464, 464.1, -465])])
        rounded = convert(near, "float", "e4m3", np.uint8).view(NUMPY["e4m3"])
        np.testing.assert_array_equal(rounded.astype(np.float32), near.astype(NUMPY["e4m3"]).astype(np.float32))
    numbers = np.concatenate([floats, rng.uniform(-300, 300, 5003).astype(np.float32), np.float32([0.5, 1.5, 254.5])])
    for zero, low in clamps:
        with np.errstate(invalid="ignore"):  # signalling NaN
            whole = np.nan_to_num(np.rint(numbers.astype(np.float64)), nan=-np.inf)
        expected = np.clip(whole + zero, low, 255)
        codes = library.run(f"quantize_{zero}_{low}", numbers, out=np.zeros(numbers.size, np.uint8), keys=numbers.size)
        np.testing.assert_array_equal(codes, expected.astype(np.uint8))
    small = floats[np.abs(floats) < 2**31]
    np.testing.assert_array_equal(convert(small, "float", "int32_t", np.int32), small.astype(np.int32))
    bytes_ = np.arange(256, dtype=np.uint8)[:-1]
    np.testing.assert_array_equal(convert(bytes_, "uint8_t", "float", np.float32), bytes_.astype(np.float32))
    np.testing.assert_array_equal(
        convert(bytes_.view(np.int8), "int8_t", "float", np.float32), bytes_.view(np.int8).astype(np.float32)
    )
    library.handle.stop()


@pytest.mark.parametrize("arch", ARCHS)
def test_reductions_and_nan(tmp_path: Path, arch: str) -> None:
    body = """float* y = a.out; const float* x = (const float*)a.x;
      vf v = ld(x, Full{}); y[0] = hsum(v); y[1] = hmax(v); y[2] = hmin(v); y[3] = hprod(v);
      vf nan = v; nan[VL - 2] = __builtin_nanf("");
      y[4] = hmax(nan); y[5] = hmin(nan); y[6] = any(nan != nan); y[7] = any(v != v);
      vf both = max(nan, v) - min(v, nan); y[8] = both[VL - 2]; y[9] = both[0];
      y[10] = (float)hsum(cvt<vd>(v)); y[11] = (float)hsum(cvt<vi64>(v)); y[12] = select(v < vf{}, v, -v)[0];
      y[13] = (float)select(cvt<vd>(v) < vd{}, v, -v)[0]; y[14] = hsum(as_bool(cvt<vd>(v) < vd{})); y[15] = VL;
      y[16] = __builtin_signbit(splat<vd>(-0.0)[1]) != 0;"""
    library = build(tmp_path, arch, [entry("reduce", body)], [])
    library.start(1)
    x = np.linspace(-1.7, 2.9, 16).astype(np.float32)
    y = library.run("reduce", x, out=np.zeros(17, np.float32))
    lanes = int(y[15])
    v = x[:lanes].astype(np.float64)
    np.testing.assert_allclose(y[:4], [v.sum(), v.max(), v.min(), v.prod()], rtol=1e-5, atol=1e-6)
    assert np.isnan(y[[4, 5, 8]]).all()
    assert list(y[[6, 7, 9]]) == [1, 0, 0]
    np.testing.assert_allclose(y[10:12], [v.sum(), np.trunc(v).sum()], rtol=1e-5, atol=1e-6)
    assert list(y[12:14]) == [x[0], x[0]]
    assert y[14] == (v < 0).sum()
    assert y[16] == 1
    library.handle.stop()


# ------------------------------------------------------------------------------------------------ thread pool
POOL_BODY = entry(
    "rounds",
    """long* cells = (long*)a.out;  // each round every thread adds what the others wrote in the round before
       for (long r = 0; r < a.keys; r++) {
         for (int i; (i = next_chunk(th, a.counters + r % 2)) < 37;) __atomic_fetch_add(&cells[0], 1, __ATOMIC_RELAXED);
         barrier(th);
         if (th.tid == 0) { cells[1] += cells[0] == 37 * (r + 1); a.counters[r % 2] = 0; }
         barrier(th);
       }""",
)


# The worker moves to the processor of the caller, which sleeps at a barrier, and then wakes the caller there. Results:
# how many processors the caller may use before and after that, and whether the shared one is among the latter.
MEETING = entry(
    "meeting",
    """long* cells = (long*)a.out;
       static long shared = -1;
       cpu_set_t set;
       barrier(th);
       if (th.tid == 1) {
         while (__atomic_load_n(&shared, __ATOMIC_RELAXED) < 0) sched_yield();
         CPU_ZERO(&set); CPU_SET(shared, &set);
         sched_setaffinity(0, sizeof set, &set);
         for (const uint64_t end = now_ns() + 2000000; now_ns() < end;) sched_yield();
         barrier(th);
       } else {
         sched_getaffinity(0, sizeof set, &set);
         cells[0] = CPU_COUNT(&set);
         __atomic_store_n(&shared, sched_getcpu(), __ATOMIC_RELAXED);
         barrier(th);
         sched_getaffinity(0, sizeof set, &set);
         cells[1] = CPU_COUNT(&set);
         cells[2] = CPU_ISSET(shared, &set);
         shared = -1;
       }""",
)


SHARES = "struct Shares { static constexpr long G = 1, NP = 280, PG = 18, IMAGES = 1, BLOCKS = 1; };" + entry(
    "shares",
    """for (long i = 0; i < Chunk<Shares>::COUNT; i++)
         ((long*)a.out)[i] = Chunk<Shares>::of(i).end - Chunk<Shares>::of(i).begin;""",
    alone=True,
)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Library:
    body = "barrier(th); __atomic_fetch_add((long*)a.out, 100 * th.n + th.tid, __ATOMIC_RELAXED);"
    alone = entry("alone", body, alone=True)
    where = entry("where", "((long*)a.out)[th.tid] = sched_getcpu();")
    return build(tmp_path_factory.mktemp("pool"), "native", [POOL_BODY, alone, where, MEETING, SHARES], ["100"])


def rounds(library: Library, count: int) -> None:
    out = library.run("rounds", out=np.zeros(2, np.int64), keys=count)
    assert list(out) == [37 * count, count]


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_pool_barriers(pool: Library, threads: int) -> None:
    pool.start(threads)
    for count in (1, 5, 300):
        rounds(pool, count)
    pool.handle.stop()


def test_pool_sleeps_and_wakes(pool: Library) -> None:
    pool.start(2)
    for _ in range(20):
        rounds(pool, 3)
        threading.Event().wait(0.002)  # far beyond the spin time
    pool.handle.stop()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity on this system")
def test_pool_workers_avoid_the_processor_of_the_caller(pool: Library) -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("one processor")
    pool.start(2)
    try:
        for cpu in [*allowed, *allowed]:
            os.sched_setaffinity(0, {cpu})
            caller, worker = pool.run("where", out=np.zeros(2, np.int64))
            assert caller == cpu != worker
    finally:
        os.sched_setaffinity(0, allowed)
        pool.handle.stop()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity on this system")
def test_pool_threads_that_meet_in_a_run_part(pool: Library) -> None:
    """The caller wakes on the processor of the worker, or on another one, which it must not leave."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("one processor")
    pool.start(2)
    try:
        parted = 0
        for _ in range(2000):
            before, after, shared = pool.run("meeting", out=np.zeros(3, np.int64))
            assert os.sched_getaffinity(0) == allowed  # of the caller, for which the run must not decide
            if before < len(allowed):  # the two met when the run began
                continue
            assert (after, shared) in ((before, 1), (before - 1, 0))
            parted += not shared
            if parted == 3:
                break
        assert parted == 3
    finally:
        pool.handle.stop()


def test_chunks_have_equal_numbers_of_panels(pool: Library) -> None:
    pool.start(1)
    sizes = pool.run("shares", out=np.zeros(16, np.int64))
    assert sizes.sum() == 280
    assert set(sizes) == {17, 18}
    assert sizes[:8].sum() == sizes[8:].sum()  # two threads
    pool.handle.stop()


def test_pool_leaves_short_work_to_the_caller(pool: Library) -> None:
    pool.start(3)
    for wait in (0, 0.002):  # while the workers spin, and when they sleep
        assert list(pool.run("alone", out=np.zeros(1, np.int64))) == [100]
        rounds(pool, 3)
        threading.Event().wait(wait)
    pool.handle.stop()


def test_pool_serialises_callers(pool: Library) -> None:
    pool.start(2)
    failures: list[BaseException] = []

    def caller(run: Callable[[], None]) -> None:
        try:
            for _ in range(30):
                run()
        except BaseException as error:
            failures.append(error)

    callers = [threading.Thread(target=caller, args=(lambda: rounds(pool, 4),)) for _ in range(4)]
    for t in callers:
        t.start()
    for t in callers:
        t.join(30)
    assert not failures
    assert not any(t.is_alive() for t in callers)
    pool.handle.stop()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_pool_survives_fork(pool: Library) -> None:
    pool.start(2)
    rounds(pool, 3)
    child = os.fork()
    if child == 0:
        try:
            rounds(pool, 3)
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    rounds(pool, 3)
    pool.handle.stop()
