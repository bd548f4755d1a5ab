// The tables of a program, which its main unit defines, and run(), which executes an entry point.
#pragma once
#include "pool.h"

namespace npu {

typedef int (*Kernel)(void* const* bufs, char* arena, Thread& th, int* counter);
typedef void (*Prefetch)(const void* weights, const Thread& th);

struct Ref { int buffer; long offset; };  // an operand; buffer < 0: the arena

// The operands are `count` elements of Entry::refs from `first` on. last: a barrier follows.
// prefetch: null, or called with operand `weights` before the preceding barrier.
struct Call { Kernel fn; int first, count; bool last; Prefetch prefetch; int weights; };

struct Entry {
  const Ref* refs;
  const Call* calls;
  int* counters;  // COUNTER_STRIDE for each call; zero between runs
  int count;      // calls
  int operands;   // at most, of one call
  bool alone;     // shorter than a thread wake-up: the calling thread runs it
};

// Runs the calls in order. `times` is null or receives count + 1 times in seconds: the start, and the end of each call.
// Returns 0, or 1 + the index of a call that found an index out of range.
int run(const Entry& entry, void* const* buffers, char* arena, double* times);

}  // namespace npu
