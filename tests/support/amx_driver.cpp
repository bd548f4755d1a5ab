// One product of tiles of any shape, through kernels/amx.h; compiled with the model of AMX, or for a CPU that has it.
#include "amx.h"
using namespace npu;
#define EXPORT extern "C" __attribute__((visibility("default")))

// kind: 0 dpbf16ps, then dpbssd, dpbsud, dpbusd, dpbuud. a [rows][words], b [words][columns], c [rows][columns], in
// words of 4 bytes. `streamed`: loads b as data that is read once.
EXPORT int product(int kind, int rows, int words, int columns, const void* a, const void* b, void* c, int streamed) {
  if (!Amx::request()) return -1;
  TileShapes shapes;
  shapes.set(0, rows, 4 * columns);
  shapes.set(3, rows, 4 * words);
  shapes.set(7, words, 4 * columns);
  Amx::configure(shapes);
  Amx::load<0>(c, 4 * columns);
  Amx::load<3>(a, 4 * words);
  if (streamed) Amx::stream<7>(b, 4 * columns);
  else Amx::load<7>(b, 4 * columns);
  switch (kind) {
    case 0: Amx::dpbf16ps<0, 3, 7>(); break;
    case 1: Amx::dpbssd<0, 3, 7>(); break;
    case 2: Amx::dpbsud<0, 3, 7>(); break;
    case 3: Amx::dpbusd<0, 3, 7>(); break;
    default: Amx::dpbuud<0, 3, 7>();
  }
  Amx::store<0>(c, 4 * columns);
  Amx::release();
  return 0;
}

// Stores a zeroed tile of `rows` x `columns` words into out, with rows `stride` bytes apart.
EXPORT void zeros(int rows, int columns, void* out, long stride) {
  TileShapes shapes;
  shapes.set(1, rows, 4 * columns);
  Amx::configure(shapes);
  Amx::zero<1>();
  Amx::store<1>(out, stride);
  Amx::release();
}

// What faults in hardware, by number.
EXPORT void fault(int number) {
  alignas(64) static char memory[1024];
  TileShapes shapes;
  for (int t = 0; t < 3; t++) shapes.set(t, 16, 64);
  switch (number) {
    case 0: return Amx::zero<0>();
    case 1: shapes.palette = 2; break;
    case 2: shapes.set(4, 17, 64); break;
    case 3: shapes.set(8, 1, 4); break;
    case 4: shapes.set(4, 16, 0); break;
    case 5: shapes.reserved[3] = 1; break;
    case 6: Amx::configure(shapes); return Amx::load<5>(memory, 64);
    case 7: shapes.set(1, 16, 32); Amx::configure(shapes); return Amx::dpbf16ps<0, 1, 2>();
    case 8: Amx::configure(shapes); Amx::release(); return Amx::store<0>(memory, 64);
  }
  Amx::configure(shapes);
}
