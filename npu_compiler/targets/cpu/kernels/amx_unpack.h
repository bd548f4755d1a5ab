// Weights in a format, unpacked into B tiles between the products of the panel before.
#pragma once
#include "amx_blocked.h"

#if NPU_AMX
namespace npu {

template <class Stored> constexpr auto has_outliers(int) -> decltype(&Stored::put_outliers, true) { return true; }
template <class Stored> constexpr bool has_outliers(...) { return false; }

// The weights of the next panel, or of two panels. run() unpacks a share of them.
template <class Plan> struct AmxUnpack {
  using Stored = typename Plan::Stored;
  static constexpr long BUFFER = AmxScratch<Plan>::UNPACKED;
  Unpacker<Stored> from;
  char* to = nullptr;
  long panels = 0, left = 0;   // panels and units of this panel that remain
  long share = 0;              // pairs of units of a call
  long first = 0, units = 0;   // of each panel
  const char* panel = nullptr;
  char* buffer = nullptr;

  // Begins with `n` units of each of `products` panels, which `calls` calls of run() unpack.
  void begin(const char* weights, char* out, long products, long first_unit, long n, long calls) {
    panel = weights, buffer = to = out, first = first_unit, units = left = n, panels = products;
    share = ceil_div(ceil_div(n, 2) * products, calls);
    from.begin(panel, Plan::UNITS, first);
  }
  NPU_NOINLINE void end_panel() {
    if constexpr (has_outliers<Stored>(0)) Stored::put_outliers(panel, Plan::UNITS, first, units, buffer);
    if (units * BF16P::W_BYTES < BUFFER)
      memset(buffer + units * BF16P::W_BYTES, 0, (size_t)(BUFFER - units * BF16P::W_BYTES));
    if (--panels == 0) return;
    panel += Plan::PRODUCT_BYTES, buffer += BUFFER, to = buffer, left = units;
    from.begin(panel, Plan::UNITS, first);
  }
  __attribute__((always_inline)) void run() {
    for (long i = share; i > 0 && panels > 0; i--) {
      const long n = left < 2 ? left : 2;
      from.next(n, to);
      to += 2 * BF16P::W_BYTES, left -= n;
      if (left == 0) {
        AmxUnpack copy = *this;  // so that members stay in registers
        copy.end_panel();
        *this = copy;
      }
    }
  }
  void finish() {
    share = units;
    while (panels > 0) run();
  }
};

}  // namespace npu
#endif
