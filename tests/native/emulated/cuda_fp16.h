// __half on a CPU.
#pragma once

#define effjax emulated  // the kernels have conversions of the same names
#include "half.h"
#undef effjax

struct __half {
  uint16_t bits;
};
inline float __half2float(__half x) { return emulated::widen(emulated::Float16{x.bits}); }
inline __half __float2half_rn(float x) {
  emulated::Float16 y;
  emulated::narrow(x, y);
  return {y.bits};
}
