// bfloat16 and float16 on CPUs: stored in 16 bits, computed in float32.
#ifndef EFFJAX_HALF_H_
#define EFFJAX_HALF_H_

#include <cstdint>
#include <cstring>

namespace effjax {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(BFloat16 x) { return bits_to_float(uint32_t{x.bits} << 16); }
inline float widen(Float16 x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16, magnitude = x.bits & 0x7fffu;
  // Moving the bits into place leaves an exponent that is 112 too small. The product corrects it,
  // also for subnormal numbers.
  const float scaled = bits_to_float(magnitude << 13) * bits_to_float(0x77800000u);  // 2^112
  const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;  // infinity or NaN
  return bits_to_float(sign | special | float_to_bits(scaled));
}

// Rounds to the nearest representable number, ties to even.
inline void narrow(float x, float& y) { y = x; }
inline void narrow(double x, double& y) { y = x; }
inline void narrow(float x, BFloat16& y) {
  const uint32_t bits = float_to_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  y.bits = static_cast<uint16_t>(x == x ? rounded : (bits >> 16) | 0x40u);
}
inline void narrow(float x, Float16& y) {
  const uint32_t bits = float_to_bits(x), sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t result;
  if (magnitude > 0x7f800000u) {
    result = 0x7e00u;  // NaN
  } else if (magnitude >= 0x477ff000u) {
    result = 0x7c00u;  // numbers from 65520 on round to infinity
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14 the result is subnormal, a multiple of 2^-24. The spacing of float32 near 1/2 is
    // also 2^-24, so adding 1/2 rounds correctly.
    result = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    result = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  y.bits = static_cast<uint16_t>(sign | result);
}

}  // namespace effjax

#endif  // EFFJAX_HALF_H_
