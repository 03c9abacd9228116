// Deformable sampling on a CPU: the loops, for any storage type T computed in A.
//
// Nothing depends on how many threads there are: a task writes what no other task writes, and sums
// in an order of its own.
#ifndef EFFJAX_DEFORM_CONV_CPU_H_
#define EFFJAX_DEFORM_CONV_CPU_H_

#include <algorithm>
#include <vector>

#include "deform_conv.h"
#include "vectors.h"

namespace effjax {

template <typename T, typename A>
struct Operands {
  Geometry g;
  int64_t first_row;
  const T* x;       // [N, H, W, C]
  const A* offset;  // [N, R, Wo, G * K * 2]
  const A* mask;    // [N, R, Wo, G * K], or nothing

  EFFJAX_INLINE bool sample(int64_t n, int64_t r, int64_t column, int64_t tap, int64_t k,
                            Sample<A>& s) const {
    const A* moved = offset + 2 * (((n * g.R + r) * g.Wo + column) * g.G * g.K + tap);
    return make_sample<A>(base_y<A>(g, first_row + r, k) + moved[0],
                          base_x<A>(g, column, k) + moved[1], g.H, g.W, s);
  }
  EFFJAX_INLINE A mask_of(int64_t n, int64_t r, int64_t column, int64_t tap) const {
    return g.has_mask ? mask[((n * g.R + r) * g.Wo + column) * g.G * g.K + tap] : A(1);
  }
};

// The columns of one row of output pixels: columns [N, R, Wo, K * C]. Pixels outside are read from
// zeros [C / G], so that there is one way through for all samples.
template <typename T, typename A>
EFFJAX_INLINE void columns_of_row(const Operands<T, A>& in, const T* zeros, int64_t n, int64_t r,
                                  T* columns) {
  const Geometry& g = in.g;
  const int64_t width = g.C / g.G;
  for (int64_t column = 0; column < g.Wo; ++column) {
    T* out = columns + ((n * g.R + r) * g.Wo + column) * g.K * g.C;
    for (int64_t k = 0; k < g.K; ++k) {
      for (int64_t group = 0; group < g.G; ++group, out += width) {
        const int64_t tap = group * g.K + k;
        Sample<A> s;
        in.sample(n, r, column, tap, k, s);
        const A mask = in.mask_of(n, r, column, tap);
        const T* pixel[4];
        A weight[4];
        for (int q = 0; q < 4; ++q) {
          const int64_t at = (n * g.H * g.W + s.pixel[q]) * g.C + group * width;
          pixel[q] = s.inside[q] ? in.x + at : zeros;
          weight[q] = s.inside[q] ? mask * s.weight[q] : A(0);
        }
        interpolate<T, A>(pixel, weight, width, out);
      }
    }
  }
}

// The gradients of one sample, by blocks [begin, end) of the channels of its group: dx += them, and
// what each block adds to doffset and dmask, parts [blocks, 3].
template <int kBytes, typename T, typename A>
EFFJAX_INLINE void gradients_of_sample(const Operands<T, A>& in, const A* dcolumns, int64_t n,
                                       int64_t r, int64_t column, int64_t k, int64_t group,
                                       int64_t begin, int64_t end, A* dx, A* parts) {
  const Geometry& g = in.g;
  const int64_t width = g.C / g.G, tap = group * g.K + k;
  Sample<A> s;
  if (!in.sample(n, r, column, tap, k, s)) {
    std::fill(parts + begin * 3, parts + end * 3, A(0));
    return;
  }
  const A mask = in.mask_of(n, r, column, tap);
  A weight[4];
  for (int q = 0; q < 4; ++q) weight[q] = mask * s.weight[q];
  const bool all = s.inside[0] && s.inside[1] && s.inside[2] && s.inside[3];
  for (int64_t block = begin; block < end; ++block) {
    const int64_t count = std::min(kBlock, width - block * kBlock);
    const int64_t channel = group * width + block * kBlock;
    const T* pixel[4];
    A *to[4], product[4] = {};
    for (int q = 0; q < 4; ++q) {
      const int64_t at = (n * g.H * g.W + s.pixel[q]) * g.C + channel;
      pixel[q] = in.x + at;
      to[q] = dx + at;
    }
    if (all) {
      scatter<kBytes, 4, T, A>(dcolumns + channel, pixel, weight, count, to, product);
    } else {
      for (int q = 0; q < 4; ++q) {
        if (!s.inside[q]) continue;
        scatter<kBytes, 1, T, A>(dcolumns + channel, pixel + q, weight + q, count, to + q, product + q);
      }
    }
    A* part = parts + block * 3;
    sample_gradients<A>(s, product, mask, part[0], part[1], part[2]);
  }
}

// The same for all samples of an image, by the blocks [first, last) of all groups': parts
// [R, Wo, K, blocks, 3].
template <int kBytes, typename T, typename A>
EFFJAX_INLINE void gradients_of_blocks(const Operands<T, A>& in, const A* dcolumns, int64_t n,
                                       int64_t first, int64_t last, A* dx, A* parts) {
  const Geometry& g = in.g;
  const int64_t width = g.C / g.G, per_group = blocks_of(width);
  const int64_t first_group = first / per_group, skip = first % per_group;
  for (int64_t r = 0; r < g.R; ++r) {
    for (int64_t column = 0; column < g.Wo; ++column) {
      const int64_t point = (n * g.R + r) * g.Wo + column;
      for (int64_t k = 0; k < g.K; ++k, parts += 3 * g.G * per_group) {
        const A* d = dcolumns + (point * g.K + k) * g.C;
        for (int64_t group = first_group; group * per_group < last; ++group) {
          const int64_t begin = group == first_group ? skip : 0;
          const int64_t end = std::min(last - group * per_group, per_group);
          gradients_of_sample<kBytes, T, A>(in, d, n, r, column, k, group, begin, end, dx,
                                            parts + group * per_group * 3);
        }
      }
    }
  }
}

// The loops for one set of instructions.
template <typename T, typename A>
struct Loops {
  void (*columns)(const Operands<T, A>&, const T* zeros, int64_t n, int64_t r, T* columns);
  void (*gradients)(const Operands<T, A>&, const A* dcolumns, int64_t n, int64_t first,
                    int64_t last, A* dx, A* parts);
};

#define EFFJAX_LOOPS(name, kBytes, target)                                                        \
  template <typename T, typename A>                                                               \
  target void columns_##name(const Operands<T, A>& in, const T* zeros, int64_t n, int64_t r,      \
                             T* columns) {                                                        \
    columns_of_row<T, A>(in, zeros, n, r, columns);                                               \
  }                                                                                               \
  template <typename T, typename A>                                                               \
  target void gradients_##name(const Operands<T, A>& in, const A* dcolumns, int64_t n,            \
                               int64_t first, int64_t last, A* dx, A* parts) {                    \
    gradients_of_blocks<kBytes, T, A>(in, dcolumns, n, first, last, dx, parts);                   \
  }

EFFJAX_LOOPS(any, 16, )
#ifdef __x86_64__
EFFJAX_LOOPS(avx2, 32, EFFJAX_AVX2)
#endif

template <typename T, typename A>
Loops<T, A> loops_for_any_cpu() {
  return {columns_any<T, A>, gradients_any<T, A>};
}

template <typename T, typename A>
Loops<T, A> loops_for_this_cpu() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return {columns_avx2<T, A>, gradients_avx2<T, A>};
  }
#endif
  return loops_for_any_cpu<T, A>();
}

// parallel(count, task) runs task(0), …, task(count - 1) on parallel.threads() threads.
template <typename T, typename A, typename Parallel>
void deform_columns(const Operands<T, A>& in, T* columns, const Parallel& parallel,
                    const Loops<T, A>& loops = loops_for_this_cpu<T, A>()) {
  const Geometry& g = in.g;
  const std::vector<T> zeros(static_cast<size_t>(g.C / g.G));
  parallel(g.N * g.R, [&](int64_t i) {
    loops.columns(in, zeros.data(), i / g.R, i % g.R, columns);
  });
}

template <typename T, typename A, typename Parallel>
void deform_columns_backward(const Operands<T, A>& in, const A* dcolumns, A* dx, A* doffset,
                             A* dmask, const Parallel& parallel,
                             const Loops<T, A>& loops = loops_for_this_cpu<T, A>()) {
  const Geometry& g = in.g;
  const int64_t per_group = blocks_of(g.C / g.G), blocks = g.G * per_group;
  const int64_t points = g.R * g.Wo, size = points * g.K * blocks * 3;
  std::vector<A> parts(static_cast<size_t>(g.N * size));
  // The channels of an image are divided only where threads would be idle: it takes longer in all.
  const int64_t images = std::max<int64_t>(g.N, 1);
  const int64_t runs = std::min((parallel.threads() + images - 1) / images, blocks);
  parallel(g.N * runs, [&](int64_t i) {
    const int64_t n = i / runs, run = i % runs;
    loops.gradients(in, dcolumns, n, blocks * run / runs, blocks * (run + 1) / runs, dx,
                    parts.data() + n * size);
  });
  parallel(g.N * g.R, [&](int64_t i) {
    for (int64_t p = i * g.Wo; p < (i + 1) * g.Wo; ++p) {
      for (int64_t tap = 0; tap < g.G * g.K; ++tap) {
        const int64_t group = tap / g.K, k = tap % g.K;
        const A* part = parts.data() + ((p * g.K + k) * blocks + group * per_group) * 3;
        A sum[3] = {};
        for (int64_t j = 0; j < 3 * per_group; ++j) sum[j % 3] += part[j];
        const int64_t at = p * g.G * g.K + tap;
        doffset[2 * at] = sum[0];
        doffset[2 * at + 1] = sum[1];
        if (g.has_mask) dmask[at] = sum[2];
      }
    }
  });
}

}  // namespace effjax

#endif  // EFFJAX_DEFORM_CONV_CPU_H_
