// RoI pooling on CPUs, for images stored as T and computed in A.
//
// The forward pass runs one task per box. The backward pass divides dx by images and blocks of
// channels. Tasks write disjoint memory and add up in a fixed order, so results do not depend on
// the number of threads.
#ifndef EFFJAX_ROI_CPU_H_
#define EFFJAX_ROI_CPU_H_

#include <limits>
#include <vector>

#include "roi.h"
#include "vectors.h"

namespace effjax {

// Arrays of one call.
template <typename T, typename A>
struct Boxes {
  Pooling g;
  const T* x;      // [N, H, W, parts * parts * C]
  const A* first;  // [N, R, P, G, 2], (y, x)
  const A* step;   // [N, R, 2]
  const A* count;  // [N, R, 2]
  bool adds;       // add to y instead of overwriting it
};

// The distinct pixels that the samples of a bin touch along one axis, with the weights of all
// samples added up. The pixels of a bin are the Cartesian product of its two lines.
template <typename A>
struct Line {
  std::vector<int64_t> at;       // offset of each pixel in elements of x
  std::vector<A> weight, slope;  // sums over samples; slope is the derivative of weight
  int64_t inside = 0;            // number of samples that count
  A first = std::numeric_limits<A>::quiet_NaN();
  std::vector<A> sums;

  // Neighboring bins of a box without offsets share a position, so the line is kept if it is
  // unchanged.
  void build(A position, A step, A count, int64_t size, A margin, int64_t stride) {
    if (position == first) return;
    first = position;
    at.clear(), weight.clear(), slope.clear();
    const Axis<A> axis = make_axis<A>(position, step, count, size, margin);
    inside = axis.end - axis.begin;
    if (inside == 0) return;
    const auto tap = [&](int64_t i) { return make_tap<A>(axis.at(i), size); };
    const Tap<A> one = tap(axis.begin), other = tap(axis.end - 1);
    const int64_t low = std::min(one.low, other.low), high = std::max(one.high, other.high);
    sums.assign(2 * (high - low + 1), A(0));
    for (int64_t i = axis.begin; i < axis.end; ++i) {
      const Tap<A> t = tap(i);
      A *const below = &sums[2 * (t.low - low)], *const above = &sums[2 * (t.high - low)];
      below[0] += A(1) - t.fraction, above[0] += t.fraction;
      below[1] -= A(t.within), above[1] += A(t.within);
    }
    for (int64_t i = low; i <= high; ++i) {
      const A* sum = &sums[2 * (i - low)];
      if (sum[0] == A(0) && sum[1] == A(0)) continue;
      at.push_back(i * stride), weight.push_back(sum[0]), slope.push_back(sum[1]);
    }
  }
};

// The two lines of a bin, and the number of samples to divide by.
template <typename A>
struct Bin {
  const Line<A>*rows, *columns;
  A divisor;
  bool adds;

  bool empty() const { return rows->at.empty() || columns->at.empty(); }
};

// Computes the bins of one box, and reuses their lines.
template <typename T, typename A>
struct Lines {
  const Boxes<T, A>& in;
  int64_t box;
  Line<A> rows;
  std::vector<Line<A>> columns;

  Lines(const Boxes<T, A>& in, int64_t box) : in(in), box(box), columns(in.g.columns) {}
  bool empty() const { return !(in.count[2 * box] >= A(1)) || !(in.count[2 * box + 1] >= A(1)); }
  Bin<A> bin(int64_t p, int64_t group) {
    const Pooling& g = in.g;
    const A *first = in.first + 2 * ((box * g.P + p) * g.G + group), *step = in.step + 2 * box;
    const A *count = in.count + 2 * box, margin = A(g.margin);
    Line<A>& across = columns[p % g.columns];
    rows.build(first[0], step[0], count[0], g.H, margin, g.W * g.pixel_size());
    across.build(first[1], step[1], count[1], g.W, margin, g.pixel_size());
    return {&rows, &across,
            g.of_inside ? A(rows.inside) * A(across.inside) : count[0] * count[1], in.adds};
  }
};

// Vector sums of kCount * kLanes channels.
template <int kBytes, int kCount, typename A>
struct Sums {
  using OfLanes = Lanes<kBytes, A>;
  OfLanes of[kCount];

  // sums += weight * channels
  template <typename T>
  EFFJAX_INLINE void add(A weight, const T* channels) {
    for (int k = 0; k < kCount; ++k) {
      A buffer[kLanes];
      const A* wide = widen(channels + k * kLanes, buffer);
      for (int i = 0; i < OfLanes::kVectors; ++i) {
        typename OfLanes::Vector value;
        std::memcpy(&value, wide + i * OfLanes::kWidth, kBytes);
        of[k].v[i] += weight * value;
      }
    }
  }
  // to += weight * sums
  EFFJAX_INLINE void add_to(A weight, A* to) const {
    for (int k = 0; k < kCount; ++k) {
      for (int i = 0; i < OfLanes::kVectors; ++i) {
        typename OfLanes::Vector value;
        A* const here = to + k * kLanes + i * OfLanes::kWidth;
        std::memcpy(&value, here, kBytes);
        value += weight * of[k].v[i];
        std::memcpy(here, &value, kBytes);
      }
    }
  }
  EFFJAX_INLINE void divide(A divisor) {
    for (int k = 0; k < kCount; ++k) {
      for (int i = 0; i < OfLanes::kVectors; ++i) of[k].v[i] /= divisor;
    }
  }
  EFFJAX_INLINE void store(A* to) const { std::memcpy(to, of, sizeof of); }
};

// Computes y for the kCount * kLanes channels at x.
template <int kBytes, int kCount, typename T, typename A>
EFFJAX_INLINE void mean_of_run(const Bin<A>& bin, const T* x, T* y) {
  Sums<kBytes, kCount, A> sums;
  const Line<A>&rows = *bin.rows, &columns = *bin.columns;
  const int64_t count = static_cast<int64_t>(columns.at.size());
  for (size_t i = 0; i < rows.at.size(); ++i) {
    const T* const row = x + rows.at[i];
    for (int64_t j = 0; j < count; ++j) {
      const A weight = rows.weight[i] * columns.weight[j];
      if (weight != A(0)) sums.add(weight, row + columns.at[j]);
    }
  }
  sums.divide(bin.divisor);
  A wide[kCount * kLanes];
  sums.store(wide);
  for (int i = 0; i < kCount * kLanes; ++i) {
    narrow(bin.adds ? wide[i] + widen(y[i]) : wide[i], y[i]);
  }
}

// dx += weight of each pixel * dy, for kCount * kLanes channels.
template <int kBytes, int kCount, typename T, typename A>
EFFJAX_INLINE void spread_run(const Bin<A>& bin, const T* dy, A* dx) {
  Sums<kBytes, kCount, A> d;
  d.add(A(1), dy);
  d.divide(bin.divisor);
  const Line<A>&rows = *bin.rows, &columns = *bin.columns;
  const int64_t count = static_cast<int64_t>(columns.at.size());
  for (size_t i = 0; i < rows.at.size(); ++i) {
    A* const row = dx + rows.at[i];
    for (int64_t j = 0; j < count; ++j) {
      const A weight = rows.weight[i] * columns.weight[j];
      if (weight != A(0)) d.add_to(weight, row + columns.at[j]);
    }
  }
}

// dfirst += dot products of dy with the derivatives of the sum of samples by the position. The
// caller divides by the number of samples.
template <int kBytes, int kCount, typename T, typename A>
EFFJAX_INLINE void slopes_of_run(const Bin<A>& bin, const T* x, const T* dy, A* dfirst) {
  Sums<kBytes, kCount, A> down, right;
  const Line<A>&rows = *bin.rows, &columns = *bin.columns;
  for (size_t i = 0; i < rows.at.size(); ++i) {
    for (size_t j = 0; j < columns.at.size(); ++j) {
      const T* const pixel = x + rows.at[i] + columns.at[j];
      const A by_y = rows.slope[i] * columns.weight[j], by_x = rows.weight[i] * columns.slope[j];
      if (by_y != A(0)) down.add(by_y, pixel);
      if (by_x != A(0)) right.add(by_x, pixel);
    }
  }
  A by_y[kCount * kLanes], by_x[kCount * kLanes];
  down.store(by_y), right.store(by_x);
  for (int i = 0; i < kCount * kLanes; ++i) {
    dfirst[0] += widen(dy[i]) * by_y[i], dfirst[1] += widen(dy[i]) * by_x[i];
  }
}

constexpr int kRuns = kBlock / kLanes;

// The following three functions handle all channels of a bin: in blocks of kBlock or kLanes, and
// the rest one by one.
template <int kBytes, typename T, typename A>
EFFJAX_INLINE void mean_of_bin(const Bin<A>& bin, const T* x, int64_t channels, T* y) {
  int64_t c = 0;
  for (; c + kBlock <= channels; c += kBlock) mean_of_run<kBytes, kRuns, T, A>(bin, x + c, y + c);
  for (; c + kLanes <= channels; c += kLanes) mean_of_run<kBytes, 1, T, A>(bin, x + c, y + c);
  for (; c < channels; ++c) {
    A sum = 0;
    for (size_t i = 0; i < bin.rows->at.size(); ++i) {
      for (size_t j = 0; j < bin.columns->at.size(); ++j) {
        const A weight = bin.rows->weight[i] * bin.columns->weight[j];
        if (weight != A(0)) sum += weight * widen(x[bin.rows->at[i] + bin.columns->at[j] + c]);
      }
    }
    narrow(bin.adds ? sum / bin.divisor + widen(y[c]) : sum / bin.divisor, y[c]);
  }
}

template <int kBytes, typename T, typename A>
EFFJAX_INLINE void spread_bin(const Bin<A>& bin, const T* dy, int64_t channels, A* dx) {
  int64_t c = 0;
  for (; c + kBlock <= channels; c += kBlock) spread_run<kBytes, kRuns, T, A>(bin, dy + c, dx + c);
  for (; c + kLanes <= channels; c += kLanes) spread_run<kBytes, 1, T, A>(bin, dy + c, dx + c);
  for (; c < channels; ++c) {
    const A d = widen(dy[c]) / bin.divisor;
    for (size_t i = 0; i < bin.rows->at.size(); ++i) {
      for (size_t j = 0; j < bin.columns->at.size(); ++j) {
        const A weight = bin.rows->weight[i] * bin.columns->weight[j];
        if (weight != A(0)) dx[bin.rows->at[i] + bin.columns->at[j] + c] += weight * d;
      }
    }
  }
}

template <int kBytes, typename T, typename A>
EFFJAX_INLINE void slopes_of_bin(const Bin<A>& bin, const T* x, const T* dy, int64_t channels,
                                 A* dfirst) {
  dfirst[0] = dfirst[1] = 0;
  int64_t c = 0;
  for (; c + 2 * kLanes <= channels; c += 2 * kLanes) {
    slopes_of_run<kBytes, 2, T, A>(bin, x + c, dy + c, dfirst);
  }
  for (; c < channels; ++c) {
    const A d = widen(dy[c]);
    for (size_t i = 0; i < bin.rows->at.size(); ++i) {
      for (size_t j = 0; j < bin.columns->at.size(); ++j) {
        const A value = widen(x[bin.rows->at[i] + bin.columns->at[j] + c]);
        const A by_y = bin.rows->slope[i] * bin.columns->weight[j];
        const A by_x = bin.rows->weight[i] * bin.columns->slope[j];
        if (by_y != A(0)) dfirst[0] += d * by_y * value;
        if (by_x != A(0)) dfirst[1] += d * by_x * value;
      }
    }
  }
  dfirst[0] /= bin.divisor, dfirst[1] /= bin.divisor;
}

// The loops, compiled for one instruction set.
template <typename T, typename A>
struct PoolingLoops {
  void (*mean)(const Bin<A>&, const T* x, int64_t channels, T* y);
  void (*spread)(const Bin<A>&, const T* dy, int64_t channels, A* dx);
  void (*slopes)(const Bin<A>&, const T* x, const T* dy, int64_t channels, A* dfirst);
};

#define EFFJAX_POOLING_LOOPS(name, kBytes, target)                                               \
  template <typename T, typename A>                                                              \
  target void mean_##name(const Bin<A>& bin, const T* x, int64_t channels, T* y) {               \
    mean_of_bin<kBytes, T, A>(bin, x, channels, y);                                              \
  }                                                                                              \
  template <typename T, typename A>                                                              \
  target void spread_##name(const Bin<A>& bin, const T* dy, int64_t channels, A* dx) {           \
    spread_bin<kBytes, T, A>(bin, dy, channels, dx);                                             \
  }                                                                                              \
  template <typename T, typename A>                                                              \
  target void slopes_##name(const Bin<A>& bin, const T* x, const T* dy, int64_t channels,        \
                            A* dfirst) {                                                         \
    slopes_of_bin<kBytes, T, A>(bin, x, dy, channels, dfirst);                                   \
  }

EFFJAX_POOLING_LOOPS(any, 16, )
#ifdef __x86_64__
EFFJAX_POOLING_LOOPS(avx2, 32, EFFJAX_AVX2)
#endif

template <typename T, typename A>
PoolingLoops<T, A> pooling_loops_for_any_cpu() {
  return {mean_any<T, A>, spread_any<T, A>, slopes_any<T, A>};
}

// Returns the AVX2 loops if this CPU supports them.
template <typename T, typename A>
PoolingLoops<T, A> pooling_loops_for_this_cpu() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return {mean_avx2<T, A>, spread_avx2<T, A>, slopes_avx2<T, A>};
  }
#endif
  return pooling_loops_for_any_cpu<T, A>();
}

// Forward pass. parallel(count, task) runs task(0), …, task(count - 1) on parallel.threads()
// threads.
template <typename T, typename A, typename Parallel>
void roi_pool(const Boxes<T, A>& in, T* y, const Parallel& parallel,
              const PoolingLoops<T, A>& loops = pooling_loops_for_this_cpu<T, A>()) {
  const Pooling& g = in.g;
  const int64_t width = g.C / g.G;
  parallel(g.N * g.R, [&](int64_t box) {
    Lines<T, A> lines(in, box);
    T* const out = y + box * g.P * g.C;
    if (lines.empty()) {
      if (!in.adds) std::memset(out, 0, g.P * g.C * sizeof(T));
      return;
    }
    const T* const image = in.x + box / g.R * g.H * g.W * g.pixel_size();
    for (int64_t p = 0; p < g.P; ++p) {
      for (int64_t group = 0; group < g.G; ++group) {
        const Bin<A> bin = lines.bin(p, group);
        T* const here = out + p * g.C + group * width;
        if (bin.empty()) {
          if (!in.adds) std::memset(here, 0, width * sizeof(T));
        } else {
          loops.mean(bin, image + g.channel_of(p) + group * width, width, here);
        }
      }
    }
  });
}

// Adds the gradients of all boxes of image n to the channels [begin, end) of each part of dx.
template <typename T, typename A>
void spread_boxes(const Boxes<T, A>& in, const T* dy, int64_t n, int64_t begin, int64_t end, A* dx,
                  const PoolingLoops<T, A>& loops) {
  const Pooling& g = in.g;
  const int64_t width = g.C / g.G;
  A* const image = dx + n * g.H * g.W * g.pixel_size();
  for (int64_t box = n * g.R; box < (n + 1) * g.R; ++box) {
    Lines<T, A> lines(in, box);
    if (lines.empty()) continue;
    for (int64_t p = 0; p < g.P; ++p) {
      for (int64_t group = 0; group < g.G; ++group) {
        const int64_t from = std::max(begin, group * width);
        const int64_t to = std::min(end, (group + 1) * width);
        if (from >= to) continue;
        const Bin<A> bin = lines.bin(p, group);
        if (bin.empty()) continue;
        loops.spread(bin, dy + (box * g.P + p) * g.C + from, to - from,
                     image + g.channel_of(p) + from);
      }
    }
  }
}

// Backward pass. Overwrites dx, and dfirst unless it is null.
template <typename T, typename A, typename Parallel>
void roi_pool_backward(const Boxes<T, A>& in, const T* dy, A* dx, A* dfirst,
                       const Parallel& parallel,
                       const PoolingLoops<T, A>& loops = pooling_loops_for_this_cpu<T, A>()) {
  const Pooling& g = in.g;
  const int64_t width = g.C / g.G, row = g.W * g.pixel_size();
  parallel(g.N * g.H, [&](int64_t i) { std::memset(dx + i * row, 0, row * sizeof(A)); });
  // Dividing an image by channels repeats the computation of its bins, so it is done only if there
  // are fewer images than threads.
  const int64_t images = std::max<int64_t>(g.N, 1), blocks = blocks_of(g.C);
  const int64_t runs = std::min((parallel.threads() + images - 1) / images, blocks);
  parallel(g.N * runs, [&](int64_t i) {
    const int64_t run = i % runs;
    spread_boxes<T, A>(in, dy, i / runs, blocks * run / runs * kBlock,
                       std::min(blocks * (run + 1) / runs * kBlock, g.C), dx, loops);
  });
  if (!dfirst) return;
  parallel(g.N * g.R, [&](int64_t box) {
    Lines<T, A> lines(in, box);
    const T* const image = in.x + box / g.R * g.H * g.W * g.pixel_size();
    for (int64_t i = 0; i < g.P * g.G; ++i) {
      A* const d = dfirst + 2 * (box * g.P * g.G + i);
      const int64_t p = i / g.G, group = i % g.G;
      d[0] = d[1] = 0;
      if (lines.empty()) continue;
      const Bin<A> bin = lines.bin(p, group);
      if (bin.empty()) continue;
      loops.slopes(bin, image + g.channel_of(p) + group * width,
                   dy + (box * g.P + p) * g.C + group * width, width, d);
    }
  });
}

}  // namespace effjax

#endif  // EFFJAX_ROI_CPU_H_
