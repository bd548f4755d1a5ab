// run() of program.h. It is compiled once for all programs, together with the thread pool, which it inlines.
#include "pool.cpp"
#include "program.h"

namespace npu {

struct Run { const Entry& entry; void* const* buffers; char* arena; double* times; int failed; };

static void run_thread(void* arg, Thread& th) {
  Run& run = *(Run*)arg;
  const Entry& entry = run.entry;
  auto place = [&](int ref) -> void* {
    const Ref& r = entry.refs[ref];
    return (r.buffer < 0 ? run.arena : (char*)run.buffers[r.buffer]) + r.offset;
  };
  void** p = (void**)__builtin_alloca(sizeof(void*) * (size_t)entry.operands);
  int done = 0;
  for (int i = 0; i < entry.count; i++) {
    const Call& call = entry.calls[i];
    for (int k = 0; k < call.count; k++) p[k] = place(k + call.first);
    if (const int found = call.fn(p, run.arena, th, entry.counters + i * COUNTER_STRIDE)) {
      int none = 0, status = i + 1 + (found == BY_ZERO ? entry.count : 0);
      __atomic_compare_exchange_n(&run.failed, &none, status, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    }
    if (!call.last && !run.times) continue;
    const Call& next = entry.calls[i + 1 < entry.count ? i + 1 : i];
    if (next.prefetch && i + 1 < entry.count) next.prefetch(place(next.first + next.weights), th);
    if (th.n > 1) barrier(th);
    if (th.tid) continue;
    for (; done <= i; done++)  // all threads have passed the barrier, so these counters are not in use
      for (int k = 0; k < COUNTER_STRIDE; k++) entry.counters[done * COUNTER_STRIDE + k] = 0;
    if (run.times) run.times[i + 1] = (double)now_ns() * 1e-9;
  }
}

int run(const Entry& entry, void* const* buffers, char* arena, double* times) {
  Run run = {entry, buffers, arena, times, 0};
  if (times) times[0] = (double)now_ns() * 1e-9;
  run_on_pool(run_thread, &run, entry.alone);
  return run.failed;
}

}  // namespace npu
