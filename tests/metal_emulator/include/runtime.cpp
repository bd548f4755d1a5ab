// Runs the threads of a threadgroup on fibres, and watches every memory access they make.
//
// Kernels are compiled with -fsanitize=thread, but not linked with that sanitiser's runtime: the functions it would
// call before each access (__tsan_read4 ...) are below. They know exactly which bytes a launch may touch, which thread
// touched them last, and what barriers lay between.
#include "runtime.h"

#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

extern "C" void emu_switch(void** save, void* to) __attribute__((visibility("hidden")));
#if defined(__x86_64__)
__asm__(
    ".text\n.p2align 4\n.hidden emu_switch\n.globl emu_switch\nemu_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nretq\n");
enum { SAVED_WORDS = 6, RETURN_WORD = 6, FRAME_WORDS = 8 };
#elif defined(__aarch64__)
__asm__(
    ".text\n.p2align 4\n.hidden emu_switch\n.globl emu_switch\nemu_switch:\n"
    "sub sp,sp,#160\nstp x19,x20,[sp]\nstp x21,x22,[sp,#16]\nstp x23,x24,[sp,#32]\nstp x25,x26,[sp,#48]\n"
    "stp x27,x28,[sp,#64]\nstp x29,x30,[sp,#80]\nstp d8,d9,[sp,#96]\nstp d10,d11,[sp,#112]\n"
    "stp d12,d13,[sp,#128]\nstp d14,d15,[sp,#144]\nmov x9,sp\nstr x9,[x0]\nmov sp,x1\n"
    "ldp x19,x20,[sp]\nldp x21,x22,[sp,#16]\nldp x23,x24,[sp,#32]\nldp x25,x26,[sp,#48]\n"
    "ldp x27,x28,[sp,#64]\nldp x29,x30,[sp,#80]\nldp d8,d9,[sp,#96]\nldp d10,d11,[sp,#112]\n"
    "ldp d12,d13,[sp,#128]\nldp d14,d15,[sp,#144]\nadd sp,sp,#160\nret\n");
enum { SAVED_WORDS = 20, RETURN_WORD = 11, FRAME_WORDS = 20 };
#else
#error "the emulator can switch fibres on x86-64 and aarch64 only"
#endif

namespace {

enum : size_t { STACK = 96 * 1024, ARENA = 128 * 1024, GRANULE = 2, VARIABLES = 64, GAP = 64 };
enum { RUNNING, AT_SIMD, AT_BARRIER };

// ------------------------------------------------------------------------------------------------------ shadow memory
// A word says who touched an element last: group (24 bits) | thread (10) | who else (2) | barriers (14) | simd (14).
enum : uint64_t { ONE = 0, SIMDGROUP = 1, GROUP = 2, GROUPS = 3 };

struct Mark {
  uint64_t word;
  Mark(uint64_t w) : word(w) {}
  Mark(uint64_t group, uint64_t thread, uint64_t barriers, uint64_t simd, uint64_t who = ONE)
      : word(group << 40 | thread << 30 | who << 28 | (barriers & 0x3fff) << 14 | (simd & 0x3fff)) {}
  uint64_t group() const { return word >> 40; }
  unsigned thread() const { return word >> 30 & 1023; }
  uint64_t who() const { return word >> 28 & 3; }
  unsigned barriers() const { return word >> 14 & 0x3fff; }
  unsigned simd() const { return word & 0x3fff; }
};

// Whether an access marked ``old`` may happen at the same time as ``now``, a single thread's.
bool unordered(Mark old, Mark now) {
  if (old.who() == GROUPS || old.group() != now.group()) return true;
  if (old.barriers() != now.barriers()) return false;
  if (old.who() == ONE && old.thread() == now.thread()) return false;
  bool same = old.who() != GROUP && old.thread() / EMU_WIDTH == now.thread() / EMU_WIDTH;
  return !(same && old.simd() != now.simd());
}

Mark joined(Mark old, Mark now) {  // both read
  if (!old.word || !unordered(old, now)) return now;
  if (old.who() == GROUPS || old.group() != now.group())
    return Mark(now.group(), now.thread(), now.barriers(), now.simd(), GROUPS);
  bool same = old.who() != GROUP && old.thread() / EMU_WIDTH == now.thread() / EMU_WIDTH;
  return Mark(now.group(), now.thread(), now.barriers(), now.simd(), same ? SIMDGROUP : GROUP);
}

uint64_t load(uint64_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
void store(uint64_t* p, Mark m) { __atomic_store_n(p, m.word, __ATOMIC_RELAXED); }

// ----------------------------------------------------------------------------------------------------------- a worker
struct Fibre {
  void* stack_pointer;
  emu_Thread thread;
  const void* value;
  const char* name;
  unsigned site, line, active;
  unsigned char waiting, bytes, memory;
};

struct Simdgroup {
  unsigned live, waiting, lanes[EMU_WIDTH];  // lane -> fibre, NONE if it has not started or is done
  uint64_t device_epoch, shared_epoch;
  alignas(16) char values[EMU_WIDTH * 16];
};

struct Variable {  // of threadgroup memory
  char *base, *end;
  const char* name;
  unsigned element;
};

// Order between groups: a group releases what it wrote by a fence before an atomic write, and another one acquires it by
// a fence after it has read that atomic.
struct Release {
  const void* atomic;
  uint64_t group;
  unsigned thread, barriers;  // of the fence
};

struct Acquire {
  const void* atomic;
  unsigned releases, thread, barriers;  // the releases that the atomic's value stands for; of the fence
};

struct Place {  // what an access touched, for messages
  const emu_Window* window;
  const Variable* variable;
};

const unsigned NONE = ~0u, RELEASES = 1 << 14, ACQUIRES = 64;

struct Worker {  // one host thread
  emu_Launch* launch;
  emu_Arguments arguments;
  Fibre fibres[EMU_THREADS];
  Simdgroup simd[EMU_WIDTH];
  unsigned order[EMU_THREADS], idle[EMU_THREADS], ready[EMU_THREADS], at_barrier[EMU_THREADS];
  unsigned current, count, started, done, barrier_count, idle_count, fibre_count, head, ready_count;
  unsigned group[3];
  uint64_t linear, serial, device_barriers, shared_barriers, random;
  const emu_Window* last_window;
  const Variable* last_variable;
  Variable variables[VARIABLES + EMU_BUFFERS];
  Release releases[RELEASES];  // of the launch
  Acquire acquires[ACQUIRES];  // of the group
  unsigned release_count, acquire_count;
  unsigned fenced[EMU_THREADS];  // by thread: 1 + the barriers before its last fence
  Acquire read[EMU_THREADS];     // by thread: the atomic that it accessed last
  char *stacks, *arena;
  size_t arena_top;
  uint64_t* arena_shadow;  // two words for each GRANULE bytes
  void* main_stack;
};

// The worker, its fibres' stacks and the arena are one block: what lies before the arena is private to the threads.
const size_t WORKER = (sizeof(Worker) + 4095) / 4096 * 4096, PRIVATE = WORKER + STACK * EMU_THREADS;

thread_local Worker* self __attribute__((tls_model("initial-exec")));

[[noreturn]] void leave(Worker* w) {  // give up the launch: no code returns to the fibres
  void* ignored;
  w->launch->failed = 1;
  emu_switch(&ignored, w->main_stack);
  abort();
}

const char* name_of(Place place) {
  static thread_local char text[80];
  if (place.window)
    snprintf(text, sizeof text, "buffer(%u)", place.window->index);
  else
    snprintf(text, sizeof text, "threadgroup memory %s", place.variable->name);
  return text;
}

const char* argument(const emu_Window* v) { return name_of({v, nullptr}); }

struct Image {  // of the kernels' shared object: its constants may be read
  char *inside, *low, *high;
};

int find_image(struct dl_phdr_info* info, size_t, void* data) {
  Image& image = *(Image*)data;
  char *low = nullptr, *high = nullptr;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
    char* start = (char*)info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
    if (!low || start < low) low = start;
    if (start + info->dlpi_phdr[i].p_memsz > high) high = start + info->dlpi_phdr[i].p_memsz;
  }
  if (image.inside < low || image.inside >= high) return 0;
  image.low = low, image.high = high;
  return 1;
}

bool is_constant(Worker* w, char* p, unsigned bytes) {
  Image image{(char*)w->launch->kernel, nullptr, nullptr};
  return dl_iterate_phdr(find_image, &image) && p >= image.low && p + bytes <= image.high;
}

// ------------------------------------------------------------------------------------------------------ memory accesses
Mark now(Worker* w, bool device) {
  const emu_Thread& t = w->fibres[w->current].thread;
  const Simdgroup& s = w->simd[t.simdgroup];
  return device ? Mark((w->linear + 1) & 0xffffff, t.index, w->device_barriers, s.device_epoch)
                : Mark(w->serial, t.index, w->shared_barriers, s.shared_epoch);
}

// Whether fences and atomics order an access of another group, marked ``old``, before this one at ``p``.
bool synchronised(Worker* w, Mark old, Mark me, const char* p) {
  bool coherent = false;
  for (unsigned i = 0; i < w->launch->window_count; i++) {
    const emu_Window& v = w->launch->windows[i];
    coherent |= v.coherent && p >= v.argument && p < v.base + v.bytes;
  }
  if (!coherent || old.who() == GROUPS || old.group() == me.group()) return false;
  for (const Acquire* a = w->acquires; a < w->acquires + w->acquire_count; a++) {
    if (a->thread != me.thread() && a->barriers >= me.barriers()) continue;
    for (const Release* r = w->releases; r < w->releases + a->releases; r++)
      if (r->atomic == a->atomic && r->group == old.group() &&
          (old.barriers() < r->barriers || (old.who() == ONE && old.thread() == r->thread && old.barriers() == r->barriers)))
        return true;
  }
  return false;
}

[[noreturn]] void race(Worker* w, Place place, uint64_t element, bool wrote, Mark old, bool write) {
  const char* where = name_of(place);
  const emu_Thread& t = w->fibres[w->current].thread;
  const char* a = wrote ? "written" : "read";
  const char* b = write ? "writes" : "reads";
  if (place.window && old.group() != now(w, true).group())
    emu_fail("data race: element %llu of %s was %s by group %llu, and group %llu %s it in the same launch",
             (unsigned long long)element, where, a, (unsigned long long)old.group() - 1, (unsigned long long)w->linear, b);
  emu_fail("data race: element %llu of %s was %s by thread %u%s, and thread %u %s it with no barrier between",
           (unsigned long long)element, where, a, old.thread(), old.who() == ONE ? "" : " among others", t.index, b);
}

const Variable* nearest_variable(Worker* w, const char* p) {
  const Variable* best = nullptr;
  uint64_t distance = ~0ull;
  for (const Variable& x : w->variables) {
    uint64_t d = p < x.base ? x.base - p : p - x.base;
    if (x.base && d < distance) best = &x, distance = d;
  }
  return best;
}

const uint64_t WHO = 3ull << 28, BARRIERS = 0x3fffull << 14;

// Whether a read changes nothing: what was written is ordered, and others of the group have read it since.
inline bool settled(uint64_t wrote, uint64_t read, Mark me, bool shared) {
  if ((read ^ me.word) >> 40 || (read ^ me.word) & BARRIERS || (read & WHO) != GROUP << 28) return false;
  if (!wrote && !shared) return true;
  return !((wrote ^ me.word) >> 40) && (wrote ^ me.word) & BARRIERS;
}

__attribute__((noinline)) void track(Worker* w, uint64_t* cell, Mark me, bool write, Place place, uint64_t at) {
  Mark wrote = load(cell), read = load(cell + 1);
  uint64_t element = at / (place.window ? place.window->element : place.variable->element);
  if (place.variable) {  // threadgroup memory is new for each group
    if (wrote.group() != me.group()) wrote = Mark(0);
    if (read.group() != me.group()) read = Mark(0);
    if (!write && !wrote.word)
      emu_fail("element %llu of %s is read before any thread has written it", (unsigned long long)element, name_of(place));
  }
  const char* p = place.window ? place.window->base + at : nullptr;
  if (wrote.word && unordered(wrote, me) && !(p && synchronised(w, wrote, me, p))) race(w, place, element, true, wrote, write);
  if (write && read.word && unordered(read, me) && !(p && synchronised(w, read, me, p))) race(w, place, element, false, read, true);
  if (write)
    store(cell, me);
  else
    store(cell + 1, joined(read, me));
}

const Variable* find_variable(Worker* w, char* p, unsigned bytes, bool write) {
  for (const Variable& x : w->variables)
    if (p >= x.base && p + bytes <= x.end) return w->last_variable = &x;
  const Variable* v = nearest_variable(w, p);
  emu_fail("%s of %u bytes outside threadgroup memory: byte %lld of %s, which has %lld bytes", write ? "write" : "read",
           bytes, (long long)(p - v->base), v->name, (long long)(v->end - v->base));
}

inline void shared_access(Worker* w, char* p, unsigned bytes, bool write, bool tracked) {
  const Variable* v = w->last_variable;
  if (p < v->base || p + bytes > v->end) v = find_variable(w, p, bytes, write);
  if (!tracked || bytes < GRANULE) return;
  Mark me = now(w, false);
  uint64_t* cell = w->arena_shadow + size_t(p - w->arena) / GRANULE * 2;
  for (char* q = p; q < p + bytes; q += GRANULE, cell += 2)
    if (write || !settled(load(cell), load(cell + 1), me, true))
      track(w, cell, me, write, {nullptr, v}, uint64_t(q - v->base));
}

bool inside(const emu_Window& v, const char* p, unsigned bytes) {
  return p >= v.base && p + bytes <= v.base + v.bytes;
}

[[noreturn]] void out_of_bounds(Worker* w, char* p, unsigned bytes, bool write) {
  const emu_Window* nearest = nullptr;
  uint64_t distance = ~0ull;
  bool read_only = false;
  for (unsigned i = 0; i < w->launch->window_count; i++) {
    const emu_Window& v = w->launch->windows[i];
    if (write && inside(v, p, bytes)) nearest = &v, read_only = true, distance = 0;
    uint64_t d = p < v.base ? v.base - p : p - v.base;
    if (d < distance) nearest = &v, distance = d;
  }
  if (read_only) emu_fail("write to %s, which this launch may only read", argument(nearest));
  if (!nearest || distance > 1u << 30) emu_fail("%s of %u bytes at a wild address", write ? "write" : "read", bytes);
  long long at = (long long)(p - nearest->argument);
  emu_fail("%s of %u bytes outside every buffer: byte %lld (element %lld) of %s, which has %llu bytes",
           write ? "write" : "read", bytes, at, at / (long long)nearest->element, argument(nearest),
           (unsigned long long)(nearest->base + nearest->bytes - nearest->argument));
}

uint64_t* shadow_of(Worker* w, const emu_Window* v) {  // windows' shadows follow each other
  uint64_t* s = w->launch->shadow;
  for (const emu_Window* x = w->launch->windows; x < v; x++)
    if (x->written) s += (x->bytes + x->element - 1) / x->element * 2;
  return s;
}

void device_access(Worker* w, char* p, unsigned bytes, bool write, bool tracked) {
  const emu_Window* v = w->last_window;
  if (!v || !inside(*v, p, bytes) || (write && !v->written)) {
    v = nullptr;  // a written window first: memory that is also written has a shadow
    for (unsigned i = 0; i < w->launch->window_count; i++) {
      const emu_Window& x = w->launch->windows[i];
      if (inside(x, p, bytes) && (x.written || (!write && !v))) {
        v = &x;
        if (x.written) break;
      }
    }
    if (!v) {
      if (!write && is_constant(w, p, bytes)) return;
      out_of_bounds(w, p, bytes, write);
    }
    w->last_window = v;
  }
  if (!v->written || !tracked || !w->launch->shadow) return;
  Mark me = now(w, true);
  uint64_t start = uint64_t(p - v->base), first = start / v->element, last = (start + bytes - 1) / v->element;
  uint64_t* cell = shadow_of(w, v) + 2 * first;
  for (uint64_t i = first; i <= last; i++, cell += 2) track(w, cell, me, write, {v, nullptr}, i * v->element);
}

inline void access(void* address, unsigned bytes, bool write, bool tracked = true) {
  Worker* w = self;
  char* p = (char*)address;
  if (size_t(p - (char*)w) < PRIVATE) return;
  if (size_t(p - w->arena) < ARENA)
    shared_access(w, p, bytes, write, tracked);
  else
    device_access(w, p, bytes, write, tracked);
}

// ------------------------------------------------------------------------------------------------------------- fibres
unsigned next_random(Worker* w, unsigned below) {
  w->random = w->random * 6364136223846793005ull + 1442695040888963407ull;
  return unsigned((w->random >> 33) % below);
}

void make_order(Worker* w, unsigned* order, unsigned n) {
  for (unsigned i = 0; i < n; i++) order[i] = w->launch->order == 1 ? n - 1 - i : i;
  if (w->launch->order != 2) return;
  for (unsigned i = n; i > 1; i--) {
    unsigned j = next_random(w, i), t = order[i - 1];
    order[i - 1] = order[j], order[j] = t;
  }
}

void run_threads(Worker* w) {  // the body of a fibre while threads are left that have not started
  while (w->started < w->count) {
    unsigned t = w->order[w->started++], me = w->current;
    const emu_Launch& l = *w->launch;
    emu_Thread& x = w->fibres[me].thread;
    unsigned split[3] = {t % l.threads[0], t / l.threads[0] % l.threads[1], t / (l.threads[0] * l.threads[1])};
    for (int d = 0; d < 3; d++) {
      x.in_group[d] = split[d], x.group[d] = w->group[d], x.group_size[d] = l.threads[d], x.groups[d] = l.groups[d];
      x.in_grid[d] = w->group[d] * l.threads[d] + split[d], x.grid_size[d] = l.groups[d] * l.threads[d];
    }
    x.index = t, x.lane = t % EMU_WIDTH, x.simdgroup = t / EMU_WIDTH;
    x.simdgroups = (w->count + EMU_WIDTH - 1) / EMU_WIDTH, x.width = EMU_WIDTH;
    Simdgroup& s = w->simd[x.simdgroup];
    s.lanes[x.lane] = me;
    l.kernel(w->arguments, x);
    s.lanes[x.lane] = NONE, s.live--, w->done++;
  }
}

void next(Worker* w);

void fibre_main() {
  for (;;) {
    Worker* w = self;
    run_threads(w);
    w->idle[w->idle_count++] = w->current;
    next(w);
  }
}

unsigned get_fibre(Worker* w) {
  if (w->idle_count) return w->idle[--w->idle_count];
  unsigned i = w->fibre_count++;
  if (w->fibre_count > w->launch->fibres) w->launch->fibres = w->fibre_count;
  // Different fibres use different cache sets.
  char* top = w->stacks + (i + 1) * STACK - i % 32 * 128;
  void** frame = (void**)((uintptr_t)top & ~(uintptr_t)15) - FRAME_WORDS;
  memset(frame, 0, FRAME_WORDS * sizeof *frame);
  frame[RETURN_WORD] = (void*)fibre_main;
  w->fibres[i].stack_pointer = frame;
  return i;
}

void make_ready(Worker* w, unsigned fibre) { w->ready[(w->head + w->ready_count++) % EMU_THREADS] = fibre; }

void release_simd(Worker* w, Simdgroup& s, unsigned site) {  // the lanes that wait at ``site`` go on together
  unsigned active = 0, memory = 0, order[EMU_WIDTH];
  for (unsigned i = 0; i < EMU_WIDTH; i++) {
    unsigned f = s.lanes[i];
    if (f == NONE || w->fibres[f].waiting != AT_SIMD || w->fibres[f].site != site) continue;
    active |= 1u << i;
    memory |= w->fibres[f].memory;
    memcpy(s.values + i * 16, w->fibres[f].value, w->fibres[f].bytes);
  }
  if (memory & 1) s.device_epoch++;
  if (memory & 2) s.shared_epoch++;
  make_order(w, order, EMU_WIDTH);
  for (unsigned i : order) {
    if (!(active >> i & 1)) continue;
    Fibre& f = w->fibres[s.lanes[i]];
    f.waiting = RUNNING, f.active = active, s.waiting--;
    make_ready(w, s.lanes[i]);
  }
}

const Fibre* stuck(Worker* w, const Simdgroup& s) {
  for (unsigned i = 0; i < EMU_WIDTH; i++)
    if (s.lanes[i] != NONE && w->fibres[s.lanes[i]].waiting == AT_SIMD) return &w->fibres[s.lanes[i]];
  return nullptr;
}

void release_divergent(Worker* w) {  // no lane can run: part of some simdgroup waits for lanes that will not come
  for (unsigned k = 0; k * EMU_WIDTH < w->count; k++) {
    Simdgroup& s = w->simd[k];
    if (!s.waiting) continue;
    const Fibre* f = stuck(w, s);
    if (!w->launch->divergent)
      emu_fail("line %u: %s is reached by part of simdgroup %u only (%u of %u lanes wait there or elsewhere)",
               f->line, f->name, k, s.waiting, w->count - k * EMU_WIDTH < EMU_WIDTH ? w->count - k * EMU_WIDTH : EMU_WIDTH);
    for (unsigned l : s.lanes)  // the earliest line first, so that branches join behind an if
      if (l != NONE && w->fibres[l].waiting == AT_SIMD && w->fibres[l].line < f->line) f = &w->fibres[l];
    release_simd(w, s, f->site);
  }
}

void release_barrier(Worker* w) {
  const Fibre& first = w->fibres[w->at_barrier[0]];
  if (w->barrier_count != w->count)
    emu_fail("line %u: %s is reached by %u of %u threads", first.line, first.name, w->barrier_count, w->count);
  unsigned order[EMU_THREADS];
  make_order(w, order, w->count);
  for (unsigned i = 0; i < w->count; i++) {
    Fibre& f = w->fibres[w->at_barrier[order[i]]];
    if (f.site != first.site)
      emu_fail("threads of one group wait at different barriers: line %u and line %u", first.line, f.line);
    f.waiting = RUNNING;
    make_ready(w, w->at_barrier[order[i]]);
  }
  if (first.memory & 1) w->device_barriers++;
  if (first.memory & 2) w->shared_barriers++;
  w->barrier_count = 0;
}

void next(Worker* w) {  // leave the current fibre for one that can run
  unsigned me = w->current, to;
  if (!w->ready_count && w->started == w->count) {
    if (w->done + w->barrier_count < w->count) release_divergent(w);
    else if (w->barrier_count) release_barrier(w);
  }
  if (w->ready_count) {
    to = w->ready[w->head];
    w->head = (w->head + 1) % EMU_THREADS, w->ready_count--;
  } else if (w->started < w->count) {
    to = get_fibre(w);
  } else {
    emu_switch(&w->fibres[me].stack_pointer, w->main_stack);
    return;
  }
  if (to == me) return;
  w->current = to;
  emu_switch(&w->fibres[me].stack_pointer, w->fibres[to].stack_pointer);
}

Worker* new_worker() {
  size_t shadow = ARENA / GRANULE * 2 * sizeof(uint64_t);
  char* memory = (char*)mmap(nullptr, PRIVATE + ARENA + shadow, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) abort();
  Worker* w = (Worker*)memory;
  w->stacks = memory + WORKER, w->arena = memory + PRIVATE, w->arena_shadow = (uint64_t*)(w->arena + ARENA);
  return w;
}

void* place(Worker* w, unsigned id, size_t bytes, size_t align, unsigned element, const char* name) {
  w->arena_top = (w->arena_top + align - 1) / align * align;
  if (w->arena_top + bytes + GAP > ARENA) emu_fail("more than %zu bytes of threadgroup memory", (size_t)ARENA);
  char* base = w->arena + w->arena_top;
  w->variables[id] = {base, base + bytes, name, element};
  memset(base, 0xff, bytes);
  w->launch->shared_used += unsigned((bytes + 15) / 16 * 16);
  w->arena_top += bytes + GAP;
  return base;
}

void run_group(Worker* w, uint64_t linear) {
  const emu_Launch& l = *w->launch;
  w->linear = linear;
  if (++w->serial > 0xffffff) {
    memset(w->arena_shadow, 0, ARENA / GRANULE * 2 * sizeof(uint64_t));
    w->serial = 1;
  }
  w->group[0] = unsigned(linear % l.groups[0]), w->group[1] = unsigned(linear / l.groups[0] % l.groups[1]);
  w->group[2] = unsigned(linear / ((uint64_t)l.groups[0] * l.groups[1]));
  w->started = w->done = w->barrier_count = w->head = w->ready_count = 0;
  w->device_barriers = w->shared_barriers = 0;
  w->acquire_count = 0;
  memset(w->fenced, 0, w->count * sizeof *w->fenced);
  memset(w->read, 0, w->count * sizeof *w->read);
  make_order(w, w->order, w->count);
  for (unsigned k = 0; k * EMU_WIDTH < w->count; k++) {
    Simdgroup& s = w->simd[k];
    s.live = w->count - k * EMU_WIDTH < EMU_WIDTH ? w->count - k * EMU_WIDTH : EMU_WIDTH;
    s.waiting = 0, s.device_epoch = s.shared_epoch = 0;
    for (unsigned& f : s.lanes) f = NONE;
  }
  memset(w->arena, 0xff, w->arena_top);  // NaN in every float type
  w->current = get_fibre(w);
  emu_switch(&w->main_stack, w->fibres[w->current].stack_pointer);
}

}  // namespace

// -------------------------------------------------------------------------------------------- called by kernels, library
#pragma GCC visibility push(default)
extern "C" {

void emu_fail(const char* format, ...) {
  Worker* w = self;
  char* text = w->launch->message;
  va_list arguments;
  va_start(arguments, format);
  int n = vsnprintf(text, EMU_MESSAGE, format, arguments);
  va_end(arguments);
  if (n > 0 && n < EMU_MESSAGE)
    snprintf(text + n, EMU_MESSAGE - n, " [group (%u, %u, %u), thread %u]", w->group[0], w->group[1], w->group[2],
             w->fibres[w->current].thread.index);
  leave(w);
}

void emu_barrier(unsigned site, unsigned line, const char* name, unsigned memory) {
  Worker* w = self;
  Fibre& f = w->fibres[w->current];
  f.site = site, f.line = line, f.name = name, f.memory = (unsigned char)memory, f.waiting = AT_BARRIER;
  w->at_barrier[w->barrier_count++] = w->current;
  next(w);
}

const char* emu_exchange(unsigned site, unsigned line, const char* name, const void* value, unsigned bytes,
                         unsigned memory, unsigned* active) {
  Worker* w = self;
  Fibre& f = w->fibres[w->current];
  Simdgroup& s = w->simd[f.thread.simdgroup];
  f.site = site, f.line = line, f.name = name, f.value = value, f.bytes = (unsigned char)bytes, f.memory = (unsigned char)memory;
  f.waiting = AT_SIMD;
  if (++s.waiting == s.live) {
    unsigned at = 0, all = (w->count - f.thread.simdgroup * EMU_WIDTH);
    for (unsigned l : s.lanes) at += l != NONE && w->fibres[l].waiting == AT_SIMD && w->fibres[l].site == site;
    if (at == s.live && (s.live == EMU_WIDTH || s.live == all || w->launch->divergent)) release_simd(w, s, site);
  }
  next(w);
  *active = f.active;
  return s.values;
}

unsigned emu_lane(void) { return self->fibres[self->current].thread.lane; }

void* emu_shared(unsigned id, size_t bytes, size_t align, unsigned element, const char* name) {
  Worker* w = self;
  if (id >= VARIABLES) emu_fail("more than %zu threadgroup variables in one kernel", (size_t)VARIABLES);
  Variable& v = w->variables[id];
  return v.base ? v.base : place(w, id, bytes, align < 16 ? 16 : align, element, name);
}

float emu_half_to_float(unsigned short bits) {
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  unsigned sign = (bits & 0x8000u) << 16, body = (bits & 0x7fffu) << 13;
  unsigned u = 0x7f800000u | body;
  float x;
  memcpy(&x, (bits & 0x7c00) == 0x7c00 ? &u : &body, sizeof x);
  if ((bits & 0x7c00) != 0x7c00) x *= 0x1p112f;
  return sign ? -x : x;
#endif
}

unsigned short emu_float_to_half(float x) {
#if defined(__F16C__)
  return _cvtss_sh(x, 0);
#else
  unsigned u;
  memcpy(&u, &x, sizeof u);
  unsigned sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return (unsigned short)(sign | 0x7e00u);
  if (a >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u);
  if (a < 0x38800000u) {  // subnormal: adding 0.5 rounds to multiples of 2^-24
    float f = (x < 0 ? -x : x) + 0.5f;
    memcpy(&u, &f, sizeof u);
    return (unsigned short)(sign | (u - 0x3f000000u));
  }
  a += 0xfffu + (a >> 13 & 1);
  return (unsigned short)(sign | (a - 0x38000000u) >> 13);
#endif
}

void emu_fence(void) {
  Worker* w = self;
  unsigned t = w->fibres[w->current].thread.index;
  w->fenced[t] = 1 + unsigned(w->device_barriers);
  if (!w->read[t].atomic) return;
  if (w->acquire_count == ACQUIRES) emu_fail("more than %u fences after atomics in one group", ACQUIRES);
  Acquire& a = w->acquires[w->acquire_count++];
  a = w->read[t], a.thread = t, a.barriers = unsigned(w->device_barriers);
}

unsigned emu_atomic_load(const void* address) {
  access((void*)address, 4, false, false);
  Worker* w = self;
  w->read[w->fibres[w->current].thread.index] = {address, w->release_count, 0, 0};
  return __atomic_load_n((const unsigned*)address, __ATOMIC_RELAXED);
}

int emu_atomic_swap(void* address, unsigned* old, unsigned made) {
  access(address, 4, true, false);
  if (!__atomic_compare_exchange_n((unsigned*)address, old, made, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return 0;
  Worker* w = self;
  unsigned t = w->fibres[w->current].thread.index;
  w->read[t] = {address, w->release_count, 0, 0};
  if (w->fenced[t]) {
    if (w->release_count == RELEASES) emu_fail("more than %u atomic writes after fences in one launch", RELEASES);
    w->releases[w->release_count++] = {address, (w->linear + 1) & 0xffffff, t, w->fenced[t] - 1};
  }
  return 1;
}

void emu_run(emu_Launch* launch) {
  static thread_local Worker* mine;
  if (!mine) mine = new_worker();
  Worker* w = self = mine;
  w->launch = launch, w->last_window = nullptr, w->last_variable = w->variables, w->random = launch->seed * 2654435761u + 1;
  w->idle_count = w->fibre_count = w->release_count = 0, w->arena_top = 0, w->current = 0;
  w->count = launch->threads[0] * launch->threads[1] * launch->threads[2];
  memset(w->variables, 0, sizeof w->variables);
  memset(&w->arguments, 0, sizeof w->arguments);
  for (unsigned i = 0; i < launch->window_count; i++)
    w->arguments.buffers[launch->windows[i].index] = launch->windows[i].argument;
  for (unsigned i = 0; i < EMU_BUFFERS; i++)
    if (launch->shared_bytes[i]) w->arguments.shared[i] = place(w, VARIABLES + i, launch->shared_bytes[i], 16, 1, "argument");
  uint64_t n = launch->last - launch->first;
  uint64_t stride = 1;  // shuffled: a walk through the groups in steps prime to their number
  if (launch->order == 2 && n > 2)
    for (stride = n / 2 + 1 + launch->seed % 3;; stride++) {
      uint64_t a = n, b = stride;
      while (b) { uint64_t r = a % b; a = b, b = r; }
      if (a == 1) break;
    }
  for (uint64_t i = 0; i < n && !launch->failed; i++)
    run_group(w, launch->first + (launch->order == 1 ? n - 1 - i : i * stride % n));
}

// The thread sanitiser's interface: called before each access.
#define HOOK(n)                                                                     \
  void __tsan_read##n(void* p) { access(p, n, false); }                             \
  void __tsan_write##n(void* p) { access(p, n, true); }                             \
  void __tsan_unaligned_read##n(void* p) { access(p, n, false); }                   \
  void __tsan_unaligned_write##n(void* p) { access(p, n, true); }                   \
  void __tsan_read_write##n(void* p) { access(p, n, false); access(p, n, true); }   \
  void __tsan_unaligned_read_write##n(void* p) { access(p, n, false); access(p, n, true); }
HOOK(1) HOOK(2) HOOK(4) HOOK(8) HOOK(16)
void __tsan_read_range(void* p, unsigned long n) { access(p, unsigned(n), false); }
void __tsan_write_range(void* p, unsigned long n) { access(p, unsigned(n), true); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void) {}
void __tsan_init(void) {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void* __tsan_memcpy(void* to, const void* from, unsigned long n) {
  access((void*)from, unsigned(n), false), access(to, unsigned(n), true);
  return memcpy(to, from, n);
}
void* __tsan_memset(void* to, int value, unsigned long n) {
  access(to, unsigned(n), true);
  return memset(to, value, n);
}

// The undefined behaviour sanitiser's: an index outside an array of known size, an integer division by zero.
struct Location { const char* file; unsigned line, column; };
void __ubsan_handle_out_of_bounds(Location* at, void* index) {
  emu_fail("line %u: index %lld is outside the array", at->line, (long long)(intptr_t)index);
}
void __ubsan_handle_divrem_overflow(Location* at, void*, void*) {
  emu_fail("line %u: integer division by zero, or of the smallest number by -1", at->line);
}
}
#pragma GCC visibility pop
