// The thread pool of pool.h. It is compiled once for all programs.
#include "pool.h"

#include "amx.h"
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

namespace npu {

constexpr int MAX_THREADS = 256;

struct alignas(64) Line { uint32_t value; uint32_t sleepers; };

struct Pool {
  Line barrier = {};  // value counts arrivals and never resets: barrier k is complete at k * n
  Line run = {};      // value counts runs; workers wait until it changes
  pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  RunFn fn = nullptr;
  void* arg = nullptr;
  int n = 1, stopping = 0;
  uint32_t spin_us = 150;
  pid_t owner = 0;
  long scratch_bytes = 0, mapped_bytes = 0;  // of one thread; of all threads
  char* scratch = nullptr;
  Thread threads[MAX_THREADS] = {};
  pthread_t handles[MAX_THREADS] = {};
#if defined(__linux__)
  cpu_set_t allowed = {};  // processors allowed to the thread that started the pool; empty if fewer than threads
  cpu_set_t callers = {};  // if `moved`: the affinity that the calling thread gets back after the run
  bool moved = false;
#endif
};

static Pool g_pool;

static inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();  // gcc and clang have it; <immintrin.h> would multiply the compile time of this file
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

static void futex_wait(uint32_t* address, uint32_t seen) {
#if defined(__linux__)
  syscall(SYS_futex, address, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
  (void)address, (void)seen;
  struct timespec pause = {0, 50000};
  nanosleep(&pause, nullptr);
#endif
}

static void futex_wake(uint32_t* address) {
#if defined(__linux__)
  syscall(SYS_futex, address, FUTEX_WAKE_PRIVATE, MAX_THREADS, nullptr, nullptr, 0);
#else
  (void)address;
#endif
}

// Notes the processor of the calling thread `th`: glibc has it in memory.
static void note_cpu(Thread& th) {
#if defined(__linux__)
  const int cpu = sched_getcpu();
#else
  const int cpu = 0;
#endif
  __atomic_store_n(&th.cpu, cpu, __ATOMIC_RELAXED);
}

#if defined(__linux__)
// Excludes the processors of the first `others` threads of the pool from the affinity of thread `tid`, which calls this.
static void leave_cpus(Pool& pool, int tid, int others) {
  cpu_set_t free = pool.allowed;
  if (tid == 0) {
    if (!pool.moved && sched_getaffinity(0, sizeof pool.callers, &pool.callers)) return;
    CPU_AND(&free, &free, &pool.callers);
  }
  for (int t = 0; t < others; t++) {
    const int cpu = __atomic_load_n(&pool.threads[t].cpu, __ATOMIC_RELAXED);
    if (t != tid && cpu >= 0 && cpu < CPU_SETSIZE) CPU_CLR(cpu, &free);
  }
  if (CPU_COUNT(&free) && !sched_setaffinity(0, sizeof free, &free)) pool.moved |= tid == 0;
}
#endif

// Notes the processor on which thread `tid`, which calls this, has woken. If one of the first `others` threads is there,
// it moves: a thread is often woken on the processor of the one that wakes it, and a scheduler may leave them together.
static void leave_shared_cpu(Pool& pool, int tid, int others) {
#if defined(__linux__)
  const int mine = sched_getcpu();
  bool shared = false;
  for (int t = 0; t < others; t++)
    shared |= t != tid && __atomic_load_n(&pool.threads[t].cpu, __ATOMIC_RELAXED) == mine;
  if (shared) leave_cpus(pool, tid, others);
#else
  (void)others;
#endif
  note_cpu(pool.threads[tid]);
}

// The calling thread belongs to the application: it gets its affinity back after the run.
static inline void restore_caller(Pool& pool) {
#if defined(__linux__)
  if (__builtin_expect(pool.moved, 0)) sched_setaffinity(0, sizeof pool.callers, &pool.callers);
  pool.moved = false;
#endif
}

uint64_t now_ns() {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

// Sleeps until line.value differs from `seen`. The sleeper count is incremented before the kernel checks the value
// again, and read after the value is changed (both sequentially consistent), so no wake-up is lost.
static void line_sleep(Line& line, uint32_t seen) {
  __atomic_fetch_add(&line.sleepers, 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&line.value, __ATOMIC_SEQ_CST) == seen) futex_wait(&line.value, seen);
  __atomic_fetch_sub(&line.sleepers, 1, __ATOMIC_SEQ_CST);
}
static void line_wake(Line& line) {
  if (__atomic_load_n(&line.sleepers, __ATOMIC_SEQ_CST)) futex_wake(&line.value);
}

static __attribute__((noinline)) void barrier_wait_long(Thread& th, uint32_t target) {
  // The other threads have long work or no processor: yield ours, and finally sleep.
  Line& line = th.pool->barrier;
  for (int i = 0;; i++) {
    uint32_t seen = __atomic_load_n(&line.value, __ATOMIC_ACQUIRE);
    if ((int32_t)(seen - target) >= 0) break;
    if (i < 64) sched_yield();
    else line_sleep(line, seen);
  }
  leave_shared_cpu(*th.pool, th.tid, th.n);
}

// Whether a thread has not begun the run: it may be waiting for the processor of a thread that waits for it.
static bool pool_awaits(const Thread* threads, int n) {
  for (int t = 1; t < n; t++)
    if (__atomic_load_n(&threads[t].cpu, __ATOMIC_RELAXED) < 0) return true;
  return false;
}

void barrier(Thread& th) {
  if (th.n == 1) return;
  Line& line = th.pool->barrier;
  uint32_t target = th.arrivals += (uint32_t)th.n;
  note_cpu(th);  // a scheduler may have moved the thread since it woke
  if (__atomic_add_fetch(&line.value, 1, __ATOMIC_SEQ_CST) == target) return line_wake(line);
  for (int i = 1; i <= 4096; i++) {
    if ((int32_t)(__atomic_load_n(&line.value, __ATOMIC_ACQUIRE) - target) >= 0) return;
    cpu_relax();
    if (i % 64 == 0 && pool_awaits(th.pool->threads, th.n)) sched_yield();
  }
  barrier_wait_long(th, target);
}

static void* pool_worker(void* p) {
  Thread& th = *(Thread*)p;
  Pool& pool = *th.pool;
  for (uint32_t seen = 0;;) {
    uint64_t deadline = 0;
    for (int i = 1; __atomic_load_n(&pool.run.value, __ATOMIC_ACQUIRE) == seen; i++) {
      cpu_relax();
      if (i % 256) continue;
      uint64_t now = now_ns();
      if (!deadline) deadline = now + pool.spin_us * 1000ull;
      if (now >= deadline) line_sleep(pool.run, seen);
    }
    seen = __atomic_load_n(&pool.run.value, __ATOMIC_ACQUIRE);
    if (pool.stopping) return nullptr;
    leave_shared_cpu(pool, th.tid, th.tid);
    pool.fn(pool.arg, th);
    barrier(th);
  }
}

static char* pool_map(long bytes) {
  void* p = mmap(nullptr, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return nullptr;
#if defined(__linux__)
  madvise(p, (size_t)bytes, MADV_HUGEPAGE);
#endif
  return (char*)p;
}

// Starts the workers for the thread count in pool.n, or fewer if the system refuses to create so many.
static void pool_spawn(Pool& pool) {
  pool.barrier.value = pool.barrier.sleepers = 0;
  pool.run.value = pool.run.sleepers = 0;
  pool.stopping = 0;
  pool.owner = getpid();
#if defined(__linux__)
  pool.moved = false;
  const bool known = !sched_getaffinity(0, sizeof pool.allowed, &pool.allowed);
  if (!known || CPU_COUNT(&pool.allowed) < pool.n) CPU_ZERO(&pool.allowed);
#endif
  int wanted = pool.n;
  for (int t = 0; t < wanted; t++)
    pool.threads[t] = Thread{t, wanted, &pool, pool.scratch + t * pool.scratch_bytes, 0, -1};
  for (int t = 1; t < wanted; t++) {
    if (pthread_create(&pool.handles[t], nullptr, pool_worker, &pool.threads[t]) == 0) continue;
    pool.n = t;  // no run has begun, so the count may still change
    for (int i = 0; i < t; i++) pool.threads[i].n = t;
    break;
  }
}

static void pool_join(Pool& pool) {
  if (pool.owner == getpid() && pool.n > 1) {
    __atomic_store_n(&pool.stopping, 1, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&pool.run.value, 1, __ATOMIC_SEQ_CST);
    line_wake(pool.run);
    for (int t = 1; t < pool.n; t++) pthread_join(pool.handles[t], nullptr);
  }
  if (pool.scratch) munmap(pool.scratch, (size_t)pool.mapped_bytes);
  pool.scratch = nullptr;
  pool.owner = 0;
  pool.n = 1;
}

// (Re)starts the pool with n threads of scratch_bytes each. Returns the number of threads, 0 if there is not enough
// memory, or -1 if the system refuses the state of matrix tiles to this process. All threads share that permission.
int pool_start(int n, long scratch_bytes) {
  if (!Amx::request()) return -1;
  Pool& pool = g_pool;
  pthread_mutex_lock(&pool.lock);
  pool_join(pool);
  pool.n = n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : n;
  // Whole pages plus one: threads share no page, and equal offsets are in different cache sets.
  pool.scratch_bytes = (scratch_bytes + 4095) / 4096 * 4096 + 4096 + 320;
  pool.mapped_bytes = pool.scratch_bytes * pool.n;
  pool.scratch = pool_map(pool.mapped_bytes);
  if (pool.scratch) pool_spawn(pool);
  int started = pool.scratch ? pool.n : 0;
  pthread_mutex_unlock(&pool.lock);
  return started;
}

// pool_run(), for callers in this unit.
static inline __attribute__((always_inline)) void run_on_pool(RunFn fn, void* arg, bool alone) {
  Pool& pool = g_pool;
  if (__builtin_expect(pool.owner != getpid(), 0)) {  // a forked child: a thread of the parent may hold the lock
    pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    pool.lock = fresh;
    pool_spawn(pool);
  }
  pthread_mutex_lock(&pool.lock);
  if (alone || pool.n == 1) {
    Thread caller = {0, 1, &pool, pool.threads[0].scratch, 0, -1};
    fn(arg, caller);
  } else {
    pool.fn = fn;
    pool.arg = arg;
    for (int t = 0; t < pool.n; t++) pool.threads[t].cpu = -1;
    leave_shared_cpu(pool, 0, 0);
    __atomic_add_fetch(&pool.run.value, 1, __ATOMIC_SEQ_CST);
    line_wake(pool.run);
    fn(arg, pool.threads[0]);
    barrier(pool.threads[0]);
    restore_caller(pool);
  }
  pthread_mutex_unlock(&pool.lock);
}

void pool_run(RunFn fn, void* arg, bool alone) { run_on_pool(fn, arg, alone); }

void pool_stop() {
  pthread_mutex_lock(&g_pool.lock);
  pool_join(g_pool);
  pthread_mutex_unlock(&g_pool.lock);
}

// The pool is kept if a thread still runs the program at exit.
__attribute__((destructor)) static void pool_unload() {
  if (pthread_mutex_trylock(&g_pool.lock)) return;
  pool_join(g_pool);
  pthread_mutex_unlock(&g_pool.lock);
}

}  // namespace npu
