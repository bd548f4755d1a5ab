// What a translated kernel and the runtime know of each other. Mirrored by ctypes in library.py: keep in step.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { EMU_BUFFERS = 31, EMU_WIDTH = 32, EMU_THREADS = 1024, EMU_MESSAGE = 512 };

struct emu_Arguments {
  void* buffers[EMU_BUFFERS];
  void* shared[EMU_BUFFERS];
};

struct emu_Thread {  // one thread of the grid
  unsigned in_grid[3], in_group[3], group[3], group_size[3], grid_size[3], groups[3];
  unsigned index, lane, simdgroup, simdgroups, width;
};

typedef void (*emu_Kernel)(const emu_Arguments&, const emu_Thread&);

struct emu_Window {  // the memory behind one buffer argument: all that the kernel may touch there
  char* base;
  uint64_t bytes;
  char* argument;    // what the kernel is given: base, or an address further on
  uint32_t element;  // size of what the kernel's pointer points to
  uint32_t index;    // of the buffer
  uint32_t written;  // whether it may write
  uint32_t coherent;  // whether groups may read what others wrote, if fences and atomics order it
};

struct emu_Launch {
  emu_Kernel kernel;
  emu_Window windows[EMU_BUFFERS];
  uint32_t window_count;
  uint32_t shared_bytes[EMU_BUFFERS];  // threadgroup arguments
  uint32_t groups[3], threads[3];
  uint64_t first, last;        // this call's share of the groups, in linear order
  uint32_t order, seed;        // 0 ascending, 1 descending, 2 shuffled
  uint32_t divergent;          // whether part of a simdgroup may meet alone
  uint32_t failed;             // out: 1 if message is set
  uint32_t shared_used;        // out: bytes of threadgroup memory
  uint32_t fibres;             // out: most fibres that a group needed
  uint64_t* shadow;            // two words for each element of the written windows, zero before the launch
  char message[EMU_MESSAGE];
};

#pragma GCC visibility push(default)
extern "C" {
void emu_run(emu_Launch* launch);
void emu_fail(const char* format, ...) __attribute__((noreturn, format(printf, 1, 2)));
// Wait for the group's other threads. ``memory``: 1 device, 2 threadgroup. ``site`` identifies the source position.
void emu_barrier(unsigned site, unsigned line, const char* name, unsigned memory);
// Wait for the simdgroup's other lanes, showing them ``bytes`` <= 16 of ``value``. The result holds every lane's, at
// lane * 16; ``*active`` has a bit for each lane that took part. Valid until this lane's next meeting.
const char* emu_exchange(unsigned site, unsigned line, const char* name, const void* value, unsigned bytes,
                         unsigned memory, unsigned* active);
// A fence for device memory, of the scope of the device.
void emu_fence(void);
unsigned emu_lane(void);
// Threadgroup variable ``id`` of the running kernel.
void* emu_shared(unsigned id, size_t bytes, size_t align, unsigned element, const char* name);
float emu_half_to_float(unsigned short bits);
unsigned short emu_float_to_half(float x);
// Atomics of four bytes. ``swap``: whether *address was *old, and is ``made`` now; else *old is what it is.
unsigned emu_atomic_load(const void* address);
int emu_atomic_swap(void* address, unsigned* old, unsigned made);
}
#pragma GCC visibility pop
