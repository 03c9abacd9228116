// Deformable sampling on a CPU: the loops, for any storage type T computed in A.
//
// Nothing depends on how many threads there are: a task writes what no other task writes, and sums
// in an order of its own.
#ifndef EFFJAX_DEFORM_CONV_CPU_H_
#define EFFJAX_DEFORM_CONV_CPU_H_

#include <algorithm>
#include <cstring>
#include <vector>

#include "deform_conv.h"
#include "half.h"

// The loops over channels are compiled for several instruction sets; the loader picks at run time.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(EFFJAX_SANITIZE)
#define EFFJAX_CLONES __attribute__((target_clones("default", "arch=haswell", "arch=skylake-avx512")))
#else
#define EFFJAX_CLONES
#endif
// Inlined into each of them.
#if defined(__GNUC__)
#define EFFJAX_INLINE inline __attribute__((always_inline))
#else
#define EFFJAX_INLINE inline
#endif

namespace effjax {

// out[c] = sum of weight[q] * pixel[q][c] over the pixels that there are (null: outside).
template <typename T, typename A>
EFFJAX_INLINE void interpolate(const T* const pixel[4], const A weight[4], int64_t count, T* out) {
  const T *p0 = pixel[0], *p1 = pixel[1], *p2 = pixel[2], *p3 = pixel[3];
  if (p0 && p1 && p2 && p3) {
    const A w0 = weight[0], w1 = weight[1], w2 = weight[2], w3 = weight[3];
    for (int64_t c = 0; c < count; ++c) {
      narrow(w0 * widen(p0[c]) + w1 * widen(p1[c]) + w2 * widen(p2[c]) + w3 * widen(p3[c]), out[c]);
    }
    return;
  }
  for (int64_t c = 0; c < count; ++c) {
    A sum = 0;
    for (int q = 0; q < 4; ++q) {
      if (pixel[q]) sum += weight[q] * widen(pixel[q][c]);
    }
    narrow(sum, out[c]);
  }
}

// Adds weight * gradient to one pixel of dx, and returns the product of gradient and pixel.
// The sum has sixteen lanes of its own, so that it is the same whatever the vector length.
template <typename T, typename A>
EFFJAX_INLINE A scatter(const A* gradient, const T* pixel, A weight, int64_t count, A* dx) {
  constexpr int kLanes = 16;
  A lanes[kLanes] = {};
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      const A d = gradient[c + i];
      lanes[i] += d * widen(pixel[c + i]);
      dx[c + i] += weight * d;
    }
  }
  for (; c < count; ++c) {
    const A d = gradient[c];
    lanes[0] += d * widen(pixel[c]);
    dx[c] += weight * d;
  }
  for (int step = kLanes / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
  }
  return lanes[0];
}

template <typename T, typename A>
struct Operands {
  Geometry g;
  int64_t first_row;
  const T* x;       // [N, H, W, C]
  const A* offset;  // [N, R, Wo, G * K * 2]
  const A* mask;    // [N, R, Wo, G * K], or nothing

  bool sample(int64_t n, int64_t r, int64_t column, int64_t tap, int64_t k, Sample<A>& s) const {
    const A* moved = offset + 2 * (((n * g.R + r) * g.Wo + column) * g.G * g.K + tap);
    return make_sample<A>(base_y<A>(g, first_row + r, k) + moved[0],
                          base_x<A>(g, column, k) + moved[1], g.H, g.W, s);
  }
  A mask_of(int64_t n, int64_t r, int64_t column, int64_t tap) const {
    return g.has_mask ? mask[((n * g.R + r) * g.Wo + column) * g.G * g.K + tap] : A(1);
  }
};

// The columns of one row of output pixels: columns [N, R, Wo, K * C].
template <typename T, typename A>
EFFJAX_INLINE void columns_of_row(const Operands<T, A>& in, int64_t n, int64_t r, T* columns) {
  const Geometry& g = in.g;
  const int64_t width = g.C / g.G;
  for (int64_t column = 0; column < g.Wo; ++column) {
    T* out = columns + ((n * g.R + r) * g.Wo + column) * g.K * g.C;
    for (int64_t k = 0; k < g.K; ++k) {
      for (int64_t group = 0; group < g.G; ++group, out += width) {
        const int64_t tap = group * g.K + k;
        Sample<A> s;
        if (!in.sample(n, r, column, tap, k, s)) {
          std::memset(out, 0, width * sizeof(T));
          continue;
        }
        const A mask = in.mask_of(n, r, column, tap);
        const T* pixel[4];
        A weight[4];
        for (int q = 0; q < 4; ++q) {
          pixel[q] = s.inside[q] ? in.x + (n * g.H * g.W + s.pixel[q]) * g.C + group * width : nullptr;
          weight[q] = mask * s.weight[q];
        }
        interpolate<T, A>(pixel, weight, width, out);
      }
    }
  }
}

// The gradients of one image, by channels [first, first + count) of one group: dx += them, and what
// these channels add to doffset and dmask, [R, Wo, K, 3].
template <typename T, typename A>
EFFJAX_INLINE void gradients_of_block(const Operands<T, A>& in, const A* dcolumns, int64_t n, int64_t group,
                        int64_t first, int64_t count, A* dx, A* parts) {
  const Geometry& g = in.g;
  const int64_t channel = group * (g.C / g.G) + first;
  for (int64_t r = 0; r < g.R; ++r) {
    for (int64_t column = 0; column < g.Wo; ++column) {
      for (int64_t k = 0; k < g.K; ++k, parts += 3) {
        const int64_t tap = group * g.K + k;
        Sample<A> s;
        if (!in.sample(n, r, column, tap, k, s)) {
          parts[0] = parts[1] = parts[2] = 0;
          continue;
        }
        const A mask = in.mask_of(n, r, column, tap);
        const A* d = dcolumns + (((n * g.R + r) * g.Wo + column) * g.K + k) * g.C + channel;
        A product[4] = {};
        for (int q = 0; q < 4; ++q) {
          if (!s.inside[q]) continue;
          const int64_t at = (n * g.H * g.W + s.pixel[q]) * g.C + channel;
          product[q] = scatter<T, A>(d, in.x + at, mask * s.weight[q], count, dx + at);
        }
        sample_gradients<A>(s, product, mask, parts[0], parts[1], parts[2]);
      }
    }
  }
}

// The two above, compiled for each instruction set.
#define EFFJAX_INSTANTIATE(T, A)                                                               \
  EFFJAX_CLONES static void columns_of(const Operands<T, A>& in, int64_t n, int64_t r, T* columns) { \
    columns_of_row<T, A>(in, n, r, columns);                                                   \
  }                                                                                            \
  EFFJAX_CLONES static void gradients_of(const Operands<T, A>& in, const A* dcolumns, int64_t n,     \
                                  int64_t group, int64_t first, int64_t count, A* dx,          \
                                  A* parts) {                                                  \
    gradients_of_block<T, A>(in, dcolumns, n, group, first, count, dx, parts);                 \
  }
EFFJAX_INSTANTIATE(float, float)
EFFJAX_INSTANTIATE(double, double)
EFFJAX_INSTANTIATE(BFloat16, float)
EFFJAX_INSTANTIATE(Float16, float)
#undef EFFJAX_INSTANTIATE

constexpr int64_t kBlock = 64;  // channels of a task of the backward pass

// parallel(count, task) runs task(0), …, task(count - 1).
template <typename T, typename A, typename Parallel>
void deform_columns(const Operands<T, A>& in, T* columns, const Parallel& parallel) {
  const Geometry& g = in.g;
  parallel(g.N * g.R, [&](int64_t i) { columns_of(in, i / g.R, i % g.R, columns); });
}

template <typename T, typename A, typename Parallel>
void deform_columns_backward(const Operands<T, A>& in, const A* dcolumns, A* dx, A* doffset,
                             A* dmask, const Parallel& parallel) {
  const Geometry& g = in.g;
  const int64_t width = g.C / g.G, blocks = std::max<int64_t>((width + kBlock - 1) / kBlock, 1);
  const int64_t points = g.R * g.Wo, size = points * g.K * 3;
  std::vector<A> parts(static_cast<size_t>(g.N * g.G * blocks * size));
  parallel(g.N * g.G * blocks, [&](int64_t i) {
    const int64_t block = i % blocks, group = i / blocks % g.G, n = i / blocks / g.G;
    gradients_of(in, dcolumns, n, group, block * kBlock,
                 std::min(kBlock, width - block * kBlock), dx, parts.data() + i * size);
  });
  parallel(g.N * g.R, [&](int64_t i) {
    const int64_t n = i / g.R, first = i % g.R * g.Wo;
    for (int64_t p = first; p < first + g.Wo; ++p) {
      for (int64_t tap = 0; tap < g.G * g.K; ++tap) {
        const int64_t group = tap / g.K, k = tap % g.K;
        A sum[3] = {};
        for (int64_t block = 0; block < blocks; ++block) {
          const A* part =
              parts.data() + ((n * g.G + group) * blocks + block) * size + (p * g.K + k) * 3;
          for (int j = 0; j < 3; ++j) sum[j] += part[j];
        }
        const int64_t at = (n * points + p) * g.G * g.K + tap;
        doffset[2 * at] = sum[0];
        doffset[2 * at + 1] = sum[1];
        if (g.has_mask) dmask[at] = sum[2];
      }
    }
  });
}

}  // namespace effjax

#endif  // EFFJAX_DEFORM_CONV_CPU_H_
