// CUDA kernels of RoI pooling.
//
// The forward kernel uses one thread per pack of V channels of a bin. The backward kernel uses a
// group of threads per bin, which share the reduction over channels.
#ifndef EFFJAX_ROI_CUDA_H_
#define EFFJAX_ROI_CUDA_H_

#include "cuda.h"
#include "roi.h"

namespace effjax {

// Arguments of the kernels. A pack is the V channels that one thread handles at a time.
template <typename T, typename A>
struct Boxes {
  Pooling g;
  const T* x;      // [N, H, W, parts * parts * C]
  const A* first;  // [N, R, P, G, 2], (y, x)
  const A* step;   // [N, R, 2]
  const A* count;  // [N, R, 2]

  // Computes the samples of a bin along both axes. `bin` counts over [N, R, P, G]. Returns the
  // number of samples to divide by, or 0 if none counts.
  __device__ A bin(int64_t bin, Axis<A>& y, Axis<A>& x) const {
    const int64_t box = bin / (g.P * g.G);
    const A margin = A(g.margin);
    const A *by = step + 2 * box, *most = count + 2 * box;
    y = make_axis<A>(first[2 * bin], by[0], most[0], g.H, margin);
    x = make_axis<A>(first[2 * bin + 1], by[1], most[1], g.W, margin);
    const A inside = A(y.end - y.begin) * A(x.end - x.begin);
    return inside > A(0) && !g.of_inside ? most[0] * most[1] : inside;
  }
  // Returns the offset of the first channel of a bin in x.
  __device__ int64_t channels(int64_t bin) const {
    const int64_t group = bin % g.G, p = bin / g.G % g.P, n = bin / (g.G * g.P * g.R);
    return n * g.H * g.W * g.pixel_size() + g.channel_of(p) + group * (g.C / g.G);
  }
};

// Returns one of the two pixels of a sample along one axis (far = 1: the higher one), its weight,
// and the derivative of the weight by the position.
template <typename A>
__device__ __forceinline__ void pixel_of(const Tap<A>& tap, int far, int64_t& at, A& weight,
                                         A& slope) {
  at = far ? tap.high : tap.low;
  weight = far ? tap.fraction : A(1) - tap.fraction;
  slope = tap.within ? A(2 * far - 1) : A(0);
}

// Forward pass: one thread per pack of y, in memory order, so writes and the reads of each pixel
// are coalesced. With `adds`, the result is added to y.
template <typename T, typename A, int V>
__global__ void __launch_bounds__(kThreads, 3)  // enough registers: fewer would spill on sm_120
    roi_pool_kernel(Boxes<T, A> in, T* y, bool adds, int64_t packs, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const Pooling& g = in.g;
  const int64_t bin = i / packs, pixel = g.pixel_size();
  Axis<A> down, across;
  const A divisor = in.bin(bin, down, across);
  if (adds && !(divisor > A(0))) return;
  A sum[V] = {};
  const T* const image = in.x + in.channels(bin) + i % packs * V;
  for (int64_t a = down.begin; divisor > A(0) && a < down.end; ++a) {
    const Tap<A> row = make_tap<A>(down.at(a), g.H);
    for (int64_t b = across.begin; b < across.end; ++b) {
      const Tap<A> column = make_tap<A>(across.at(b), g.W);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        int64_t top, left;
        A by_row, by_column, slope;
        pixel_of<A>(row, q >> 1, top, by_row, slope);
        pixel_of<A>(column, q & 1, left, by_column, slope);
        const A weight = by_row * by_column;
        if (weight == A(0)) continue;
        const auto value = load<T, V>(image + (top * g.W + left) * pixel);
#pragma unroll
        for (int v = 0; v < V; ++v) sum[v] += weight * widen(value.at[v]);
      }
    }
  }
  Vector<T, V>* const to = reinterpret_cast<Vector<T, V>*>(y) + i;
  Vector<T, V> out{};
  if (adds) out = *to;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const A mean = divisor > A(0) ? sum[v] / divisor : A(0);
    narrow(adds ? mean + widen(out.at[v]) : mean, out.at[v]);
  }
  *to = out;
}

// Backward pass: `lanes` consecutive threads, a power of two, per bin. Adds to dx atomically.
// Writes dfirst after a shuffle reduction over channels, unless it is null; x is then not read.
template <typename T, typename A, int V>
__global__ void __launch_bounds__(kThreads, 2)  // two blocks per SM leave enough registers
    roi_gradients_kernel(Boxes<T, A> in, const T* dy, A* dx, A* dfirst, int64_t packs,
                         int64_t count, int lanes) {
  const Pooling& g = in.g;
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t bin = thread / lanes, lane = thread % lanes, pixel = g.pixel_size();
  const bool active = bin < count;  // inactive threads stay for the shuffles
  Axis<A> down{}, across{};
  const A divisor = active ? in.bin(bin, down, across) : A(0);
  A by_y = 0, by_x = 0;
  if (divisor > A(0)) {
    const int64_t image = in.channels(bin);
    for (int64_t pack = lane; pack < packs; pack += lanes) {
      const auto d = load<T, V>(dy + (bin * packs + pack) * V);
      for (int64_t a = down.begin; a < down.end; ++a) {
        const Tap<A> row = make_tap<A>(down.at(a), g.H);
        for (int64_t b = across.begin; b < across.end; ++b) {
          const Tap<A> column = make_tap<A>(across.at(b), g.W);
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            int64_t top, left;
            A by_row, by_column, row_slope, column_slope;
            pixel_of<A>(row, q >> 1, top, by_row, row_slope);
            pixel_of<A>(column, q & 1, left, by_column, column_slope);
            const int64_t at = image + (top * g.W + left) * pixel + pack * V;
            if (const A weight = by_row * by_column / divisor; weight != A(0)) {
              A more[V];
#pragma unroll
              for (int v = 0; v < V; ++v) more[v] = weight * widen(d.at[v]);
              add<A, V>(dx + at, more);
            }
            const A slope_y = row_slope * by_column, slope_x = by_row * column_slope;
            if (!dfirst || (slope_y == A(0) && slope_x == A(0))) continue;
            const auto value = load<T, V>(in.x + at);
            A dot = 0;
#pragma unroll
            for (int v = 0; v < V; ++v) dot += widen(d.at[v]) * widen(value.at[v]);
            if (slope_y != A(0)) by_y += slope_y * dot;
            if (slope_x != A(0)) by_x += slope_x * dot;
          }
        }
      }
    }
  }
  if (!dfirst) return;
  for (int step = lanes / 2; step > 0; step /= 2) {
    by_y += __shfl_down_sync(kAllLanes, by_y, step, lanes);
    by_x += __shfl_down_sync(kAllLanes, by_x, step, lanes);
  }
  if (!active || lane != 0) return;
  dfirst[2 * bin] = divisor > A(0) ? by_y / divisor : A(0);
  dfirst[2 * bin + 1] = divisor > A(0) ? by_x / divisor : A(0);
}

}  // namespace effjax

#endif  // EFFJAX_ROI_CUDA_H_
