// The tables of a program, which its main unit defines, and run(), which executes an entry point.
#pragma once
#include "pool.h"

namespace npu {

// Returns 0, 1 if an index was out of range, BY_ZERO if an integer was divided by zero, or 3 for both.
typedef int (*Kernel)(void* const* bufs, char* arena, Thread& th, int* counter);
constexpr int BY_ZERO = 2;
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
// Returns 0; 1 + the number of a call that found an index out of range; or `entry.count` more if it divided by zero.
int run(const Entry& entry, void* const* buffers, char* arena, double* times);

}  // namespace npu
