// The thread pool of a program. Every thread runs the whole program function; barriers separate the kernels.
//
//   pool_start(n, scratch_bytes);              once; n == 1 creates no thread
//   pool_run(fn, arg);                         calls fn(arg, Thread&) on all n threads; returns when all have finished
//   pool_run(fn, arg, true);                   calls fn on the calling thread only: for runs shorter than a wake-up
//   barrier(th);                               between kernels
//   for (int i; (i = next_chunk(th, counter)) < total;) ...
//   pool_stop();                               joins the workers (also done when the program is unloaded)
//
// After a run the workers spin for a bounded time, so that the next run starts at once, and then sleep on a futex.
// A thread often wakes on the processor of another thread of the pool, after a pause or a long wait at a barrier. It
// moves to a free processor, because the two threads would be time-sliced. A child of fork() has no workers; its first
// run starts them again.
#pragma once
#include <stdint.h>

namespace npu {

// The chunk counters of a kernel fill four cache lines, over which those of its threads are spread: a line that two
// threads count in moves between their caches at every claim.
constexpr int COUNTER_STRIDE = 64, MAX_OWNERS = 16;

struct Pool;
struct Thread {
  int tid, n;
  Pool* pool;
  char* scratch;
  uint32_t arrivals;  // arrivals of all threads that complete the last barrier which this thread entered
  int cpu;            // the processor on which this thread last woke or came to a barrier; -1: it has not begun the run
};

// The scratch memory of the first of the threads, which are neighbours in memory.
inline char* first_scratch(Thread& th) { return (&th - th.tid)->scratch; }

typedef void (*RunFn)(void* arg, Thread& th);

int pool_start(int n, long scratch_bytes);
void pool_run(RunFn fn, void* arg, bool alone = false);
void pool_stop();
void barrier(Thread& th);
uint64_t now_ns();  // of the monotonic clock

// Claims the next chunk of a kernel: 0, 1, 2, ... Each value is returned to one thread. The program zeroes the counters
// before a run.
inline int next_chunk(Thread& th, int* counter) {
  if (th.n == 1) return (*counter)++;
  return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
}

// Claims one of `count` chunks: of the thread's own part first, so that rows stay in its caches from one kernel to the
// next, then of what other threads have left. `part` is 0 at first. More than MAX_OWNERS threads have no own parts.
inline long own_chunk(Thread& th, int* counter, long count, long& part) {
  if (th.n == 1 || th.n > MAX_OWNERS) return next_chunk(th, counter);
  for (; part < th.n; part++) {
    const int owner = (th.tid + part) % th.n;
    const long i = count * owner / th.n + next_chunk(th, counter + owner * (COUNTER_STRIDE / th.n));
    if (i < count * (owner + 1) / th.n) return i;
  }
  return count;
}

}  // namespace npu
