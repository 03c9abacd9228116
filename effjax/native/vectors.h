// Innermost loops over channels on CPUs, for data stored as T and computed in A.
#ifndef EFFJAX_VECTORS_H_
#define EFFJAX_VECTORS_H_

#include <algorithm>
#include <cstring>

#include "half.h"
#include "sampling.h"

// On x86, the loops are compiled twice: for any CPU and for CPUs with AVX2. The choice is made at
// run time. GCC's target_clones is not used, because it selects by the CPU models known to the
// compiler. AVX-512 was measured to be no faster in float32, and 1.25 to 1.4 times as fast for
// columns of bfloat16.
#ifdef __x86_64__
#define EFFJAX_AVX2 __attribute__((target("avx2,fma")))
#endif

// Placed before a loop: tells the compiler that the loop's writes do not overlap its reads.
#ifdef __clang__
#define EFFJAX_NO_OVERLAP _Pragma("clang loop vectorize(assume_safety)")
#else
#define EFFJAX_NO_OVERLAP _Pragma("GCC ivdep")
#endif

namespace effjax {

// kLanes sums in vectors of kBytes each. The number of lanes is the same for all instruction sets.
constexpr int kLanes = 16;
template <int kBytes, typename A>
struct Lanes {
  typedef A Vector __attribute__((vector_size(kBytes)));
  static constexpr int kWidth = kBytes / sizeof(A), kVectors = kLanes / kWidth;
  Vector v[kVectors] = {};
};

// Returns kLanes numbers converted to A: `from` itself if no conversion is needed, else `wide`.
template <typename A>
EFFJAX_INLINE const A* widen(const A* from, A*) { return from; }
template <typename T, typename A>
EFFJAX_INLINE const A* widen(const T* from, A* wide) {
  for (int i = 0; i < kLanes; ++i) wide[i] = widen(from[i]);
  return wide;
}

// Sums of a vector and of all lanes. They add halves pairwise, so the order of the additions is the
// same for every vector length.
template <int kBytes, typename A, typename Vector>
EFFJAX_INLINE A sum_of(const Vector& v) {
  if constexpr (kBytes == sizeof(A)) {
    return v[0];
  } else {
    typedef A Half __attribute__((vector_size(kBytes / 2)));
    Half half[2];
    std::memcpy(half, &v, sizeof v);
    return sum_of<kBytes / 2, A>(half[0] + half[1]);
  }
}
template <int kBytes, typename A>
EFFJAX_INLINE A sum_of(Lanes<kBytes, A>& lanes) {
  for (int step = lanes.kVectors / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) lanes.v[i] += lanes.v[i + step];
  }
  return sum_of<kBytes, A>(lanes.v[0]);
}

// out[c] = sum over q of weight[q] * pixel[q][c]
template <typename T, typename A>
EFFJAX_INLINE void interpolate(const T* const pixel[4], const A weight[4], int64_t count,
                               T* out) {
  const T *p0 = pixel[0], *p1 = pixel[1], *p2 = pixel[2], *p3 = pixel[3];
  const A w0 = weight[0], w1 = weight[1], w2 = weight[2], w3 = weight[3];
  EFFJAX_NO_OVERLAP
  for (int64_t c = 0; c < count; ++c) {
    narrow(w0 * widen(p0[c]) + w1 * widen(p1[c]) + w2 * widen(p2[c]) + w3 * widen(p3[c]), out[c]);
  }
}

// For each pixel q: adds weight[q] * gradient to dx[q], and sets product[q] to the dot product of
// gradient and pixel[q].
template <int kBytes, int kPixels, typename T, typename A>
EFFJAX_INLINE void scatter(const A* gradient, const T* const* pixel, const A* weight,
                           int64_t count, A* const* dx, A* product) {
  using Lanes = Lanes<kBytes, A>;
  Lanes products[kPixels];
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) {
    A wide[kPixels][kLanes];
    const A* x[kPixels];
    for (int q = 0; q < kPixels; ++q) x[q] = widen(pixel[q] + c, wide[q]);
    for (int i = 0; i < Lanes::kVectors; ++i) {
      typename Lanes::Vector d, value, sum;
      std::memcpy(&d, gradient + c + i * Lanes::kWidth, kBytes);
      for (int q = 0; q < kPixels; ++q) {
        A* const to = dx[q] + c + i * Lanes::kWidth;
        std::memcpy(&value, x[q] + i * Lanes::kWidth, kBytes);
        std::memcpy(&sum, to, kBytes);
        products[q].v[i] += d * value;
        sum += weight[q] * d;
        std::memcpy(to, &sum, kBytes);
      }
    }
  }
  for (int q = 0; q < kPixels; ++q) product[q] = sum_of(products[q]);
  for (; c < count; ++c) {
    for (int q = 0; q < kPixels; ++q) {
      product[q] += gradient[c] * widen(pixel[q][c]);
      dx[q][c] += weight[q] * gradient[c];
    }
  }
}

constexpr int64_t kBlock = 64;  // channels that one task of the backward pass handles as a unit

// Returns the number of blocks of `width` channels, at least 1.
inline int64_t blocks_of(int64_t width) {
  return std::max<int64_t>((width + kBlock - 1) / kBlock, 1);
}

}  // namespace effjax

#endif  // EFFJAX_VECTORS_H_
