// Deformable sampling ("columns") and its gradients on CPUs, for images stored as T and computed
// in A.
//
// The forward pass runs one task per row of output pixels. The backward pass divides dx into
// disjoint parts, one per task. Tasks add up in a fixed order, so results do not depend on the
// number of threads.
#ifndef EFFJAX_DEFORM_CONV_CPU_H_
#define EFFJAX_DEFORM_CONV_CPU_H_

#include <algorithm>
#include <cmath>
#include <vector>

#include "deform_conv.h"
#include "vectors.h"

namespace effjax {

// Arrays of one call.
template <typename T, typename A>
struct Operands {
  Geometry g;
  int64_t first_row;
  const T* x;       // [N, H, W, C]
  const A* offset;  // [N, Ho, Wo, G * K * 2]
  const A* mask;    // [N, Ho, Wo, G * K], or null

  EFFJAX_INLINE int64_t first_tap_of(int64_t n, int64_t r, int64_t column) const {
    return first_tap<int64_t>(g, n, first_row + r, column);
  }

  EFFJAX_INLINE bool sample(int64_t n, int64_t r, int64_t column, int64_t tap, int32_t k,
                            Sample<A>& s) const {
    const int32_t width = int32_t(g.kernel_w);  // 64-bit division is slow
    const A* moved = offset + 2 * (first_tap_of(n, r, column) + tap);
    return make_sample<A>(base_y<A>(g, first_row + r, k / width) + moved[0],
                          base_x<A>(g, column, k % width) + moved[1], g.H, g.W, s);
  }
  // Returns true if a sample may touch the rows [begin, end) of the image. This is cheaper than
  // computing the sample.
  EFFJAX_INLINE bool reaches(int64_t n, int64_t r, int64_t column, int64_t tap, int32_t k,
                             int64_t begin, int64_t end) const {
    const A moved = offset[2 * (first_tap_of(n, r, column) + tap)];
    const double y = base_y<A>(g, first_row + r, k / int32_t(g.kernel_w)) + moved;
    return (y >= double(begin - 1)) & (y < double(end));
  }
  EFFJAX_INLINE A mask_of(int64_t n, int64_t r, int64_t column, int64_t tap) const {
    return g.has_mask ? mask[first_tap_of(n, r, column) + tap] : A(1);
  }
};

// Computes columns [N, R, Wo, K * C] for one row of output pixels. Corners outside of the image
// read `zeros` [C / G], so that all samples take the same path.
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

// The part of dx that one task of the backward pass computes: the rows `rows` of image n, in the
// blocks [first, last) of channels, counted over all groups.
struct Rows {
  int64_t begin, end;
};
struct Share {
  int64_t n, first, last;
  Rows rows;
};

// Returns the rows of the image that the samples of one row of output pixels may touch.
template <typename T, typename A>
Rows reach_of_row(const Operands<T, A>& in, int64_t n, int64_t r) {
  const Geometry& g = in.g;
  double least = double(g.H), most = -2;
  const A* moved = in.offset + 2 * in.first_tap_of(n, r, 0);
  for (int64_t column = 0; column < g.Wo * g.G; ++column) {
    for (int64_t k = 0; k < g.K; ++k, moved += 2) {
      const double y = base_y<A>(g, in.first_row + r, int32_t(k) / int32_t(g.kernel_w)) + moved[0];
      const bool touches = (y > -1) & (y < double(g.H));  // false for NaN
      least = touches && y < least ? y : least;
      most = touches && y > most ? y : most;
    }
  }
  const auto first = static_cast<int64_t>(std::floor(least));
  const auto last = static_cast<int64_t>(std::floor(most)) + 1;
  return {std::max<int64_t>(first, 0), std::min(last + 1, g.H)};
}

// Backward pass of one sample, for the blocks [begin, end) of channels of its group: adds to dx,
// and writes the dot products of each block of dcolumns with those corners that lie in the share,
// as products [blocks, 4].
template <int kBytes, typename T, typename A>
EFFJAX_INLINE void gradients_of_sample(const Operands<T, A>& in, const A* dcolumns,
                                       const Share& share, int64_t r, int64_t column, int64_t k,
                                       int64_t group, int64_t begin, int64_t end, A* dx,
                                       A* products) {
  const Geometry& g = in.g;
  const int64_t n = share.n, width = g.C / g.G, tap = group * g.K + k;
  const bool part = share.rows.begin > 0 || share.rows.end < g.H;
  if (part && !in.reaches(n, r, column, tap, k, share.rows.begin, share.rows.end)) return;
  Sample<A> s;
  if (!in.sample(n, r, column, tap, k, s)) return;
  for (int q = 0; part && q < 4; ++q) {
    s.inside[q] &= (s.pixel[q] >= share.rows.begin * g.W) & (s.pixel[q] < share.rows.end * g.W);
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
    for (int q = 0; q < 4; ++q) {
      if (s.inside[q]) products[block * 4 + q] = product[q];
    }
  }
}

// Backward pass of all samples of an image for one share. `reach` [R] holds the rows touched by
// each output row, or is null. products [R, Wo, K, blocks, 4] must be zero on entry.
template <int kBytes, typename T, typename A>
EFFJAX_INLINE void gradients_of_share(const Operands<T, A>& in, const A* dcolumns,
                                      const Share& share, const Rows* reach, A* dx, A* products) {
  const Geometry& g = in.g;
  const int64_t per_group = blocks_of(g.C / g.G), of_sample = 4 * g.G * per_group;
  const int64_t first_group = share.first / per_group, skip = share.first % per_group;
  for (int64_t r = 0; r < g.R; ++r) {
    if (reach && (reach[r].begin >= share.rows.end || reach[r].end <= share.rows.begin)) continue;
    for (int64_t column = 0; column < g.Wo; ++column) {
      const int64_t point = r * g.Wo + column;
      for (int64_t k = 0; k < g.K; ++k) {
        const A* d = dcolumns + ((share.n * g.R * g.Wo + point) * g.K + k) * g.C;
        A* const here = products + (point * g.K + k) * of_sample;
        for (int64_t group = first_group; group * per_group < share.last; ++group) {
          const int64_t begin = group == first_group ? skip : 0;
          const int64_t end = std::min(share.last - group * per_group, per_group);
          gradients_of_sample<kBytes, T, A>(in, d, share, r, column, k, group, begin, end, dx,
                                            here + group * per_group * 4);
        }
      }
    }
  }
}

// Computes doffset and dmask for one row of output pixels from products [Wo, K, blocks, 4]. The
// products are added up in the order of the blocks, whatever tasks computed them.
template <typename T, typename A>
EFFJAX_INLINE void positions_of_row(const Operands<T, A>& in, int64_t n, int64_t r,
                                    const A* products, A* doffset, A* dmask) {
  const Geometry& g = in.g;
  const int64_t per_group = blocks_of(g.C / g.G);
  int64_t at = in.first_tap_of(n, r, 0);
  for (int64_t column = 0; column < g.Wo; ++column) {
    for (int64_t group = 0; group < g.G; ++group) {
      for (int64_t k = 0; k < g.K; ++k, ++at) {
        const A* part = products + ((column * g.K + k) * g.G + group) * per_group * 4;
        A product[4] = {}, sum[3] = {};
        for (int64_t block = 0; block < per_group; ++block, part += 4) {
          for (int q = 0; q < 4; ++q) product[q] += part[q];
        }
        const int64_t tap = group * g.K + k;
        Sample<A> s;
        if (in.sample(n, r, column, tap, k, s)) {
          sample_gradients(s, product, in.mask_of(n, r, column, tap), sum[0], sum[1], sum[2]);
        }
        doffset[2 * at] = sum[0];
        doffset[2 * at + 1] = sum[1];
        if (g.has_mask) dmask[at] = sum[2];
      }
    }
  }
}

// The loops, compiled for one instruction set.
template <typename T, typename A>
struct Loops {
  void (*columns)(const Operands<T, A>&, const T* zeros, int64_t n, int64_t r, T* columns);
  void (*gradients)(const Operands<T, A>&, const A* dcolumns, const Share&, const Rows*, A* dx,
                    A* products);
  void (*positions)(const Operands<T, A>&, int64_t n, int64_t r, const A* products, A* doffset,
                    A* dmask);
};

#define EFFJAX_LOOPS(name, kBytes, target)                                                        \
  template <typename T, typename A>                                                               \
  target void columns_##name(const Operands<T, A>& in, const T* zeros, int64_t n, int64_t r,      \
                             T* columns) {                                                        \
    columns_of_row<T, A>(in, zeros, n, r, columns);                                               \
  }                                                                                               \
  template <typename T, typename A>                                                               \
  target void gradients_##name(const Operands<T, A>& in, const A* dcolumns, const Share& share,   \
                               const Rows* reach, A* dx, A* products) {                           \
    gradients_of_share<kBytes, T, A>(in, dcolumns, share, reach, dx, products);                   \
  }                                                                                               \
  template <typename T, typename A>                                                               \
  target void positions_##name(const Operands<T, A>& in, int64_t n, int64_t r, const A* products, \
                               A* doffset, A* dmask) {                                            \
    positions_of_row<T, A>(in, n, r, products, doffset, dmask);                                   \
  }

EFFJAX_LOOPS(any, 16, )
#ifdef __x86_64__
EFFJAX_LOOPS(avx2, 32, EFFJAX_AVX2)
#endif

template <typename T, typename A>
Loops<T, A> loops_for_any_cpu() {
  return {columns_any<T, A>, gradients_any<T, A>, positions_any<T, A>};
}

// Returns the AVX2 loops if this CPU supports them.
template <typename T, typename A>
Loops<T, A> loops_for_this_cpu() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return {columns_avx2<T, A>, gradients_avx2<T, A>, positions_avx2<T, A>};
  }
#endif
  return loops_for_any_cpu<T, A>();
}

// Forward pass. parallel(count, task) runs task(0), …, task(count - 1) on parallel.threads()
// threads.
template <typename T, typename A, typename Parallel>
void deform_columns(const Operands<T, A>& in, T* columns, const Parallel& parallel,
                    const Loops<T, A>& loops = loops_for_this_cpu<T, A>()) {
  const Geometry& g = in.g;
  const std::vector<T> zeros(static_cast<size_t>(g.C / g.G));
  parallel(g.N * g.R, [&](int64_t i) {
    loops.columns(in, zeros.data(), i / g.R, i % g.R, columns);
  });
}

// Backward pass. Adds to dx; writes doffset and dmask.
template <typename T, typename A, typename Parallel>
void deform_columns_backward(const Operands<T, A>& in, const A* dcolumns, A* dx, A* doffset,
                             A* dmask, const Parallel& parallel,
                             const Loops<T, A>& loops = loops_for_this_cpu<T, A>()) {
  const Geometry& g = in.g;
  const int64_t blocks = g.G * blocks_of(g.C / g.G), row = g.Wo * g.K * blocks * 4;
  std::vector<A> products(static_cast<size_t>(g.N * g.R * row));
  // Dividing an image into several tasks costs extra work, so it is done only if there are fewer
  // images than threads. Blocks of channels are divided first. Bands of rows come second, because
  // each band has to look at all samples again.
  const int64_t images = std::max<int64_t>(g.N, 1);
  const int64_t wanted = (parallel.threads() + images - 1) / images;
  const int64_t runs = std::min(wanted, blocks);
  const int64_t bands = std::max<int64_t>(std::min((wanted + runs - 1) / runs, g.H), 1);
  std::vector<Rows> reach(static_cast<size_t>(bands > 1 ? g.N * g.R : 0));
  if (bands > 1) {
    parallel(g.N * g.R, [&](int64_t i) {
      reach[static_cast<size_t>(i)] = reach_of_row(in, i / g.R, i % g.R);
    });
  }
  parallel(g.N * runs * bands, [&](int64_t i) {
    const int64_t n = i / (runs * bands), run = i / bands % runs, band = i % bands;
    const Rows* const here = bands > 1 ? reach.data() + n * g.R : nullptr;
    Rows all{here ? g.H : 0, here ? 0 : g.H};  // the rows that are touched at all
    for (int64_t r = 0; here && r < g.R; ++r) {
      all = {std::min(all.begin, here[r].begin), std::max(all.end, here[r].end)};
    }
    const int64_t count = std::max<int64_t>(all.end - all.begin, 0);
    const Rows rows{all.begin + count * band / bands, all.begin + count * (band + 1) / bands};
    const Share share{n, blocks * run / runs, blocks * (run + 1) / runs, rows};
    loops.gradients(in, dcolumns, share, here, dx, products.data() + n * g.R * row);
  });
  parallel(g.N * g.R, [&](int64_t i) {
    loops.positions(in, i / g.R, i % g.R, products.data() + i * row, doffset, dmask);
  });
}

}  // namespace effjax

#endif  // EFFJAX_DEFORM_CONV_CPU_H_
