// __nv_bfloat16 on a CPU.
#pragma once

#define effjax emulated  // the kernels have conversions of the same names
#include "half.h"
#undef effjax

struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) { return emulated::widen(emulated::BFloat16{x.bits}); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  emulated::BFloat16 y;
  emulated::narrow(x, y);
  return {y.bits};
}
