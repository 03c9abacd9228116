// Deformable attention on CPUs, for values stored as T and computed in A.
//
// The forward pass runs one task per kQueries queries of an image. The backward pass runs one task
// per image and head, or several per head, each for some of the levels, if there are fewer heads
// than threads. Tasks write disjoint memory and add up in a fixed order, so results do not depend
// on the number of threads.
#ifndef EFFJAX_DEFORM_ATTENTION_CPU_H_
#define EFFJAX_DEFORM_ATTENTION_CPU_H_

#include <algorithm>
#include <vector>

#include "deform_attention.h"
#include "vectors.h"

namespace effjax {

constexpr int kPoints = 16;   // samples whose positions are computed together
constexpr int64_t kQueries = 16;  // queries per task of the forward pass

// The level of each point, expanded to one entry per point. All heads share it. With it, the loop
// over points in make_samples reads consecutive numbers and can be vectorized.
template <typename A>
struct PointLevels {
  std::vector<A> height, width, scale_x, scale_y;  // position in pixels = location * scale - shift
  A shift;
  std::vector<int32_t> rows, columns, start;

  explicit PointLevels(const Attention& g) : shift(g.normalized ? A(0.5) : A(0)) {
    int64_t first = 0;
    for (const Level& level : g.levels) {
      for (int64_t p = 0; p < g.P; ++p) {
        height.push_back(A(level.height));
        width.push_back(A(level.width));
        scale_x.push_back(g.normalized ? A(level.width) : A(1));
        scale_y.push_back(g.normalized ? A(level.height) : A(1));
        rows.push_back(int32_t(level.height));
        columns.push_back(int32_t(level.width));
        start.push_back(int32_t(first));
      }
      first += level.height * level.width;
    }
  }
};

template <typename T, typename A>
struct AttentionOperands {
  const Attention& g;
  const PointLevels<A>& points;
  const T* value;      // [N, S, M, D]
  const A* locations;  // [N, Q, M, L * P, 2], (x, y)
  const A* weights;    // [N, Q, M, L * P]
};

// Up to kPoints samples, stored as one array per field. Corner q is 0: upper left, 1: upper right,
// 2: lower left, 3: lower right. pixel[q][i] is -1, and weight[q][i] is 0, if corner q of sample i
// lies outside of the level. The weights are the bilinear ones, without the attention weight.
template <typename A>
struct Samples {
  int32_t pixel[4][kPoints];
  A weight[4][kPoints], down[kPoints], right[kPoints];
};

// Computes the samples of points [first, first + count) of a head.
//
// The loop has no branches, so that it can be vectorized. `touches` is false for NaN, and
// out-of-range coordinates are replaced by 0 before the conversion to integers, which would be
// undefined for them.
template <typename T, typename A>
EFFJAX_INLINE void make_samples(const AttentionOperands<T, A>& in, const A* locations, int first,
                                int count, Samples<A>& s) {
  const PointLevels<A>& points = in.points;
  const A* const heights = points.height.data() + first;
  const A* const widths = points.width.data() + first;
  const A* const scale_x = points.scale_x.data() + first;
  const A* const scale_y = points.scale_y.data() + first;
  const int32_t* const rows = points.rows.data() + first;
  const int32_t* const columns = points.columns.data() + first;
  const int32_t* const start = points.start.data() + first;
  const A shift = points.shift;
  locations += 2 * first;
  EFFJAX_NO_OVERLAP
  for (int i = 0; i < count; ++i) {
    const A x_at = locations[2 * i] * scale_x[i] - shift;
    const A y_at = locations[2 * i + 1] * scale_y[i] - shift;
    const bool touches = (y_at > A(-1)) & (x_at > A(-1)) & (y_at < heights[i]) & (x_at < widths[i]);
    const A x = touches ? x_at : A(0), y = touches ? y_at : A(0);
    int32_t row = static_cast<int32_t>(y), column = static_cast<int32_t>(x);
    row -= A(row) > y;  // the conversion rounds towards zero; correct it to floor
    column -= A(column) > x;
    const A down = y - A(row), right = x - A(column), up = A(1) - down, left = A(1) - right;
    const A weights[4] = {up * left, up * right, down * left, down * right};
    const bool upper = touches & (row >= 0), lower = touches & (row + 1 < rows[i]);
    const bool before = column >= 0, after = column + 1 < columns[i];
    const int32_t at = start[i] + row * columns[i] + column, below = at + columns[i];
    const int32_t pixels[4] = {at, at + 1, below, below + 1};
    s.down[i] = down;
    s.right[i] = right;
    for (int q = 0; q < 4; ++q) {
      const bool inside = (q / 2 ? lower : upper) & (q % 2 ? after : before);
      s.pixel[q][i] = inside ? pixels[q] : -1;
      s.weight[q][i] = inside ? weights[q] : A(0);
    }
  }
}

// Adds the weighted sum of `count` samples to sum[0..kLanes * kBlocks), for the block of channels
// at `value`. Corners outside of the level read `zeros`, which avoids a branch.
template <int kBytes, int kBlocks, typename T, typename A>
EFFJAX_INLINE void add_samples(const Samples<A>& s, const A* attention, int count, const T* value,
                               int64_t stride, const T* zeros, A* sum) {
  using Lanes = Lanes<kBytes, A>;
  Lanes sums[2][kBlocks];  // separate sums of upper and lower corners shorten the dependency chains
  for (int i = 0; i < count; ++i) {
    for (int q = 0; q < 4; ++q) {
      const int64_t pixel = s.pixel[q][i];
      const T* const from = pixel < 0 ? zeros : value + pixel * stride;
      const A weight = pixel < 0 ? A(0) : attention[i] * s.weight[q][i];
      for (int b = 0; b < kBlocks; ++b) {
        A wide[kLanes];
        const A* const x = widen(from + b * kLanes, wide);
        for (int v = 0; v < Lanes::kVectors; ++v) {
          typename Lanes::Vector more;
          std::memcpy(&more, x + v * Lanes::kWidth, kBytes);
          sums[q / 2][b].v[v] += weight * more;
        }
      }
    }
  }
  for (int b = 0; b < kBlocks; ++b) {
    for (int v = 0; v < Lanes::kVectors; ++v) {
      typename Lanes::Vector total;
      A* const to = sum + b * kLanes + v * Lanes::kWidth;
      std::memcpy(&total, to, kBytes);
      total += sums[0][b].v[v] + sums[1][b].v[v];
      std::memcpy(to, &total, kBytes);
    }
  }
}

// Returns the weighted sum of the samples for one channel.
template <typename T, typename A>
EFFJAX_INLINE A sum_of_channel(const Samples<A>& s, const A* attention, int count, const T* value,
                               int64_t stride) {
  A sum = 0;
  for (int i = 0; i < count; ++i) {
    for (int q = 0; q < 4; ++q) {
      const int64_t pixel = s.pixel[q][i];
      if (pixel >= 0) sum += attention[i] * s.weight[q][i] * widen(value[pixel * stride]);
    }
  }
  return sum;
}

// Computes y [N, Q, M, D] of the queries [begin, end) of image n. `sum` is a buffer of D numbers.
template <int kBytes, typename T, typename A>
EFFJAX_INLINE void attend_queries(const AttentionOperands<T, A>& in, const T* zeros, int64_t n,
                                  int64_t begin, int64_t end, A* sum, T* y) {
  const Attention& g = in.g;
  const int64_t points = g.points(), stride = g.M * g.D;
  constexpr int kTwo = 2 * kLanes;
  for (int64_t head = (n * g.Q + begin) * g.M; head < (n * g.Q + end) * g.M; ++head) {
    const T* const value = in.value + n * g.S * stride + head % g.M * g.D;
    std::fill(sum, sum + g.D, A(0));
    for (int64_t first = 0; first < points; first += kPoints) {
      const int count = static_cast<int>(std::min<int64_t>(kPoints, points - first));
      Samples<A> s;
      make_samples(in, in.locations + head * points * 2, int(first), count, s);
      const A* const attention = in.weights + head * points + first;
      int64_t c = 0;
      for (; c + kTwo <= g.D; c += kTwo) {
        add_samples<kBytes, 2, T, A>(s, attention, count, value + c, stride, zeros, sum + c);
      }
      for (; c + kLanes <= g.D; c += kLanes) {
        add_samples<kBytes, 1, T, A>(s, attention, count, value + c, stride, zeros, sum + c);
      }
      for (; c < g.D; ++c) sum[c] += sum_of_channel(s, attention, count, value + c, stride);
    }
    for (int64_t c = 0; c < g.D; ++c) narrow(sum[c], y[head * g.D + c]);
  }
}

// Computes the gradients of the points [begin, end) of all queries, for head m of image n. Adds to
// dvalue [N, S, M, D]; writes dlocations and dweights. `wide` is a buffer of D numbers.
template <int kBytes, typename T, typename A>
EFFJAX_INLINE void gradients_of_head(const AttentionOperands<T, A>& in, const T* dy, int64_t n,
                                     int64_t m, int64_t begin, int64_t end, A* wide, A* dvalue,
                                     A* dlocations, A* dweights) {
  const Attention& g = in.g;
  const int64_t points = g.points(), stride = g.M * g.D, image = n * g.S * stride + m * g.D;
  for (int64_t query = 0; query < g.Q; ++query) {
    const int64_t head = (n * g.Q + query) * g.M + m;
    for (int64_t c = 0; c < g.D; ++c) wide[c] = widen(dy[head * g.D + c]);
    for (int64_t first = begin; first < end; first += kPoints) {
      const int count = static_cast<int>(std::min<int64_t>(kPoints, end - first));
      Samples<A> s;
      make_samples(in, in.locations + head * points * 2, int(first), count, s);
      for (int i = 0; i < count; ++i) {
        const int64_t at = head * points + first + i;
        const A attention = in.weights[at];
        const T* pixel[4];
        A *to[4], weight[4], product[4] = {};
        bool all = true;
        for (int q = 0; q < 4; ++q) {
          const int64_t place = image + std::max<int64_t>(s.pixel[q][i], 0) * stride;
          all &= s.pixel[q][i] >= 0;
          pixel[q] = in.value + place;
          to[q] = dvalue + place;
          weight[q] = attention * s.weight[q][i];
        }
        if (all) {
          scatter<kBytes, 4, T, A>(wide, pixel, weight, g.D, to, product);
        } else {
          for (int q = 0; q < 4; ++q) {
            if (s.pixel[q][i] < 0) continue;
            scatter<kBytes, 1, T, A>(wide, pixel + q, weight + q, g.D, to + q, product + q);
          }
        }
        const A down = s.down[i], right = s.right[i];
        const A dx = (A(1) - down) * (product[1] - product[0]) + down * (product[3] - product[2]);
        const A dy = (A(1) - right) * (product[2] - product[0]) + right * (product[3] - product[1]);
        A dweight = 0;
        for (int q = 0; q < 4; ++q) dweight += s.weight[q][i] * product[q];
        const bool touches = (s.pixel[0][i] & s.pixel[1][i] & s.pixel[2][i] & s.pixel[3][i]) != -1;
        const A width = in.points.scale_x[first + i], height = in.points.scale_y[first + i];
        dlocations[2 * at] = touches ? attention * dx * width : A(0);
        dlocations[2 * at + 1] = touches ? attention * dy * height : A(0);
        dweights[at] = dweight;
      }
    }
  }
}

// The loops, compiled for one instruction set.
template <typename T, typename A>
struct AttentionLoops {
  void (*attend)(const AttentionOperands<T, A>&, const T* zeros, int64_t n, int64_t begin,
                 int64_t end, A* sum, T* y);
  void (*gradients)(const AttentionOperands<T, A>&, const T* dy, int64_t n, int64_t m,
                    int64_t begin, int64_t end, A* wide, A* dvalue, A* dlocations, A* dweights);
};

#define EFFJAX_ATTENTION_LOOPS(name, kBytes, target)                                              \
  template <typename T, typename A>                                                               \
  target void attend_##name(const AttentionOperands<T, A>& in, const T* zeros, int64_t n,         \
                            int64_t begin, int64_t end, A* sum, T* y) {                           \
    attend_queries<kBytes, T, A>(in, zeros, n, begin, end, sum, y);                               \
  }                                                                                               \
  template <typename T, typename A>                                                               \
  target void attention_gradients_##name(const AttentionOperands<T, A>& in, const T* dy,          \
                                         int64_t n, int64_t m, int64_t begin, int64_t end,        \
                                         A* wide, A* dvalue, A* dlocations, A* dweights) {        \
    gradients_of_head<kBytes, T, A>(in, dy, n, m, begin, end, wide, dvalue, dlocations, dweights); \
  }

EFFJAX_ATTENTION_LOOPS(any, 16, )
#ifdef __x86_64__
EFFJAX_ATTENTION_LOOPS(avx2, 32, EFFJAX_AVX2)
#endif

template <typename T, typename A>
AttentionLoops<T, A> attention_loops_for_any_cpu() {
  return {attend_any<T, A>, attention_gradients_any<T, A>};
}

// Returns the AVX2 loops if this CPU supports them.
template <typename T, typename A>
AttentionLoops<T, A> attention_loops_for_this_cpu() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return {attend_avx2<T, A>, attention_gradients_avx2<T, A>};
  }
#endif
  return attention_loops_for_any_cpu<T, A>();
}

// Forward pass. parallel(count, task) runs task(0), …, task(count - 1) on parallel.threads()
// threads.
template <typename T, typename A, typename Parallel>
void attend_all(const AttentionOperands<T, A>& in, T* y, const Parallel& parallel,
            const AttentionLoops<T, A>& loops = attention_loops_for_this_cpu<T, A>()) {
  const Attention& g = in.g;
  const std::vector<T> zeros(2 * kLanes);
  const int64_t tasks = (g.Q + kQueries - 1) / kQueries;
  parallel(g.N * tasks, [&](int64_t i) {
    std::vector<A> sum(static_cast<size_t>(g.D));
    const int64_t begin = i % tasks * kQueries, end = std::min(begin + kQueries, g.Q);
    loops.attend(in, zeros.data(), i / tasks, begin, end, sum.data(), y);
  });
}

// Backward pass. Overwrites all results.
template <typename T, typename A, typename Parallel>
void attend_all_backward(const AttentionOperands<T, A>& in, const T* dy, A* dvalue, A* dlocations,
                         A* dweights, const Parallel& parallel,
                         const AttentionLoops<T, A>& loops = attention_loops_for_this_cpu<T, A>()) {
  const Attention& g = in.g;
  const int64_t values = g.N * g.S * g.M * g.D, parts = parallel.threads();
  parallel(parts, [&](int64_t i) {
    std::fill(dvalue + values * i / parts, dvalue + values * (i + 1) / parts, A(0));
  });
  // Levels have no pixels in common, so the levels of a head can be separate tasks. This repeats
  // the conversion of dy per task and is done only if there are fewer heads than threads.
  const int64_t heads = g.N * g.M, levels = static_cast<int64_t>(g.levels.size());
  const int64_t idle = (parallel.threads() + heads - 1) / std::max<int64_t>(heads, 1);
  const int64_t runs = std::min(std::max<int64_t>(idle, 1), levels);
  parallel(heads * runs, [&](int64_t i) {
    std::vector<A> wide(static_cast<size_t>(g.D));
    const int64_t head = i / runs, begin = levels * (i % runs) / runs * g.P;
    const int64_t end = levels * (i % runs + 1) / runs * g.P;
    loops.gradients(in, dy, head / g.M, head % g.M, begin, end, wide.data(), dvalue, dlocations,
                    dweights);
  });
}

}  // namespace effjax

#endif  // EFFJAX_DEFORM_ATTENTION_CPU_H_
