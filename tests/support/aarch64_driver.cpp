// Runs one entry point of an aarch64 program under an emulator:  driver PROGRAM.so SYMBOL THREADS BUFFERS
//
// BUFFERS is a file of int64 words and the memory of all buffers, which the run changes in place:
//   status, rows, table length, then per row: buffer id (-1: the arena), offset in the file.
// The status is that of the entry point. The exit code is 0 if the entry point ran.
//
// The driver is linked without a C runtime, so that a compiler without the C library of aarch64 can build it.
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>

extern "C" int __libc_start_main(int (*)(int, char**), int, char**, void (*)(), void (*)(), void (*)(), void*);

static int fail(const char* what, const char* why) {
  fprintf(stderr, "%s: %s\n", what, why);
  return 1;
}

static int run(int argc, char** argv) {
  if (argc != 5) return fail("driver", "wrong number of arguments");
  void* program = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (!program) return fail(argv[1], dlerror());
  auto entry = (int (*)(void* const*, char*, double*))dlsym(program, argv[2]);
  auto start = (int (*)(int))dlsym(program, "npu_start");
  auto stop = (void (*)())dlsym(program, "npu_stop");
  if (!entry || !start || !stop) return fail(argv[2], "the program lacks a symbol");

  const int file = open(argv[4], O_RDWR);
  struct stat info;
  if (file < 0 || fstat(file, &info)) return fail(argv[4], "cannot be read");
  void* map = mmap(nullptr, (size_t)info.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (map == MAP_FAILED) return fail(argv[4], "cannot be mapped");

  int64_t* words = (int64_t*)map;
  void** table = (void**)calloc((size_t)words[2] + 1, sizeof(void*));
  char* arena = nullptr;
  for (int64_t row = 0; row < words[1]; row++) {
    const int64_t id = words[3 + 2 * row];
    char* memory = (char*)map + words[4 + 2 * row];
    if (id < 0) arena = memory;
    else table[id] = memory;
  }
  if (start(atoi(argv[3])) < 1) return fail("npu_start", "the thread pool does not start");
  words[0] = entry(table, arena, nullptr);
  stop();
  return 0;
}

extern "C" __attribute__((noreturn, used)) void start_c(long* stack) {
  __libc_start_main(run, (int)stack[0], (char**)(stack + 1), nullptr, nullptr, nullptr, stack);
  abort();
}

__asm__(
    ".globl _start\n"
    "_start:\n"
    "  mov x29, #0\n"
    "  mov x30, #0\n"
    "  mov x0, sp\n"
    "  b start_c\n");
