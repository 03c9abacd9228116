// Channels on a CPU, stored as any T and computed in A: the innermost loops of all samplers.
#ifndef EFFJAX_VECTORS_H_
#define EFFJAX_VECTORS_H_

#include <algorithm>
#include <cstring>

#include "half.h"
#include "sampling.h"

// The loops are compiled twice on x86: for any CPU, and for those that have AVX2, which is found out
// at run time. (GCC's target_clones cannot do it: it knows CPUs by name, those of its time. AVX-512
// is no faster in float32; columns of bfloat16 took 0.7 to 0.8 of the time with it.)
#ifdef __x86_64__
#define EFFJAX_AVX2 __attribute__((target("avx2,fma")))
#endif

// Before a loop: what it writes overlaps nothing that it reads.
#ifdef __clang__
#define EFFJAX_NO_OVERLAP _Pragma("clang loop vectorize(assume_safety)")
#else
#define EFFJAX_NO_OVERLAP _Pragma("GCC ivdep")
#endif

namespace effjax {

// Sixteen sums, in vectors of kBytes.
constexpr int kLanes = 16;
template <int kBytes, typename A>
struct Lanes {
  typedef A Vector __attribute__((vector_size(kBytes)));
  static constexpr int kWidth = kBytes / sizeof(A), kVectors = kLanes / kWidth;
  Vector v[kVectors] = {};
};

// Sixteen numbers in A: where they are, or in `wide`.
template <typename A>
EFFJAX_INLINE const A* widen(const A* from, A*) { return from; }
template <typename T, typename A>
EFFJAX_INLINE const A* widen(const T* from, A* wide) {
  for (int i = 0; i < kLanes; ++i) wide[i] = widen(from[i]);
  return wide;
}

// The sum of a vector, and of lanes: by halves, in one order whatever the length of a vector.
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

// out[c] = sum of weight[q] * pixel[q][c]
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

// Adds weight[q] * gradient to pixel q of dx; product[q] is that of gradient and pixel q of x.
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

constexpr int64_t kBlock = 64;  // channels of a group that are summed in one go, backward

inline int64_t blocks_of(int64_t width) {
  return std::max<int64_t>((width + kBlock - 1) / kBlock, 1);
}

}  // namespace effjax

#endif  // EFFJAX_VECTORS_H_
