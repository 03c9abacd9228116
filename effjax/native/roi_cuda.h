// CUDA kernels of RoI pooling.
//
// A block of threads handles a range of consecutive bins, numbered over [N, R, P, G]. First, each
// thread finds the samples of one bin that count and stores their range in shared memory. Then the
// threads visit the packs of channels of all these bins.
#ifndef EFFJAX_ROI_CUDA_H_
#define EFFJAX_ROI_CUDA_H_

#include "cuda.h"
#include "roi.h"

namespace effjax {

// Arguments of the kernels. A pack is the V channels that one thread handles at a time. The number of
// bins and the offsets in x are 64-bit, all other indices 32-bit.
template <typename T, typename A>
struct Boxes {
  Pooling g;
  const T* x;       // [N, H, W, parts * parts * C]
  const A* first;   // [N, R, P, G, 2], (y, x)
  const A* step;    // [N, R, 2]
  const A* count;   // [N, R, 2]
  int64_t bins;     // N * R * P * G
  int32_t packs;    // packs per group: C / G / V
  int32_t H, W, parts;
  int32_t pixel_size;  // channels of x
  Divisor<int32_t> by_packs, by_bins, by_P, by_G, by_R, by_rows, by_columns;  // by_bins: P * G

  // Returns the block of channels of x for a bin (position-sensitive if parts > 1).
  __device__ __forceinline__ int32_t block_of(int32_t p) const {
    const int32_t row = by_columns.quotient(p), column = p - row * by_columns.d;
    return by_rows.quotient(row * parts) * parts + by_columns.quotient(column * parts);
  }

  // Finds the samples of a bin along both axes. Returns the reciprocal of the number of samples to
  // divide by, or 0 if none counts.
  __device__ __forceinline__ A axes(int64_t bin, int32_t box, Axis<A, int32_t>& y,
                                    Axis<A, int32_t>& x) const {
    const A margin = A(g.margin);
    const auto at = load<A, 2>(first + 2 * bin), by = load<A, 2>(step + 2 * int64_t(box));
    const auto most = load<A, 2>(count + 2 * int64_t(box));
    y = make_axis<A, int32_t>(at.at[0], by.at[0], most.at[0], H, margin);
    x = make_axis<A, int32_t>(at.at[1], by.at[1], most.at[1], W, margin);
    const A inside = A(y.end - y.begin) * A(x.end - x.begin);
    if (!(inside > A(0))) return A(0);
    return A(1) / (g.of_inside ? inside : most.at[0] * most.at[1]);
  }
};

// The bins of a block in shared memory.
template <typename A>
struct SharedBins {
  Vector<A, 4> position[kThreads];     // first and step: y, x, y, x
  Vector<int32_t, 4> range[kThreads];  // begin and end of the samples that count: y, y, x, x
  A scale[kThreads];                   // reciprocal of the number of samples, or 0
  int64_t channels[kThreads];          // offset of the bin's first channel in x

  // Stores the bin with this thread's number after `first_bin`.
  template <typename T>
  __device__ __forceinline__ void put(const Boxes<T, A>& in, int64_t first_bin) {
    const int64_t first_box = first_bin / in.by_bins.d;  // the same for all threads
    const int32_t after = static_cast<int32_t>(first_bin - first_box * in.by_bins.d) +
                          static_cast<int32_t>(threadIdx.x);
    const int32_t boxes = in.by_bins.quotient(after), of_box = after - boxes * in.by_bins.d;
    const int32_t box = static_cast<int32_t>(first_box) + boxes, n = in.by_R.quotient(box);
    const int32_t p = in.by_G.quotient(of_box), group = of_box - p * in.by_G.d;
    Axis<A, int32_t> y, x;
    const int at = threadIdx.x;
    scale[at] = in.axes(first_bin + at, box, y, x);
    position[at] = {y.first, x.first, y.step, x.step};
    range[at] = {y.begin, y.end, x.begin, x.end};
    channels[at] = int64_t(n) * in.H * in.W * in.pixel_size + in.block_of(p) * in.g.C +
                   group * (in.g.C / in.g.G);
  }
};

// Forward pass: computes y [N, R, P, C], with `block` bins per block of threads. With `adds`, the
// result is added to y.
//
// In the second phase, consecutive threads write consecutive packs of y, and the packs of a bin are
// contiguous in each pixel, so reads and writes are coalesced. The four loads of a sample are issued
// before the first result is used, to hide their latency.
template <typename T, typename A, int V>
__global__ void __launch_bounds__(kThreads, 3)  // leaves enough registers for four loads in flight
    roi_pool_kernel(Boxes<T, A> in, T* y, bool adds, int block) {
  __shared__ SharedBins<A> shared;
  const int64_t first = int64_t(blockIdx.x) * block;
  const int32_t count = static_cast<int32_t>(min(int64_t(block), in.bins - first));
  if (static_cast<int32_t>(threadIdx.x) < count) shared.put(in, first);
  __syncthreads();
  const int64_t row_size = int64_t(in.W) * in.pixel_size;
  const uint32_t pixel_bytes = in.pixel_size * sizeof(T);
  auto* const to = reinterpret_cast<Vector<T, V>*>(y) + first * in.packs;
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < count * in.packs; i += kThreads) {
    const int32_t bin = in.by_packs.quotient(i), pack = i - bin * in.packs;
    const A scale = shared.scale[bin];
    if (adds && scale == A(0)) continue;
    const auto position = shared.position[bin];
    auto range = shared.range[bin];
    if (scale == A(0)) range.at[1] = range.at[0];
    const T* const image = in.x + shared.channels[bin] + pack * V;
    A sum[V] = {};
#pragma unroll 1
    for (int32_t a = range.at[0]; a < range.at[1]; ++a) {
      const auto row = make_tap<A, int32_t>(position.at[0] + A(a) * position.at[2], in.H);
      const T* const line[2] = {image + row.low * row_size, image + row.high * row_size};
      const A by_row[2] = {A(1) - row.fraction, row.fraction};
#pragma unroll 1
      for (int32_t b = range.at[2]; b < range.at[3]; ++b) {
        const auto column = make_tap<A, int32_t>(position.at[1] + A(b) * position.at[3], in.W);
        const A by_column[2] = {A(1) - column.fraction, column.fraction};
        Vector<T, V> stored[4];
        A weight[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          weight[q] = by_row[q >> 1] * by_column[q & 1];
          const T* const at = advance(line[q >> 1], q & 1 ? column.high : column.low, pixel_bytes);
          stored[q] = load_if(weight[q] != A(0), reinterpret_cast<const Vector<T, V>*>(at));
        }
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          A corner[V];
          widen(stored[q], corner);
#pragma unroll
          for (int v = 0; v < V; ++v) sum[v] += weight[q] * corner[v];
        }
      }
    }
    Vector<T, V> out{};
    if (adds) out = to[i];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const A mean = sum[v] * scale;
      narrow(adds ? mean + widen(out.at[v]) : mean, out.at[v]);
    }
    to[i] = out;
  }
}

// Adds the products of d with the four pixels of a sample, times the derivatives of their weights,
// to by_y and by_x.
template <typename T, typename A, int V>
__device__ __forceinline__ void add_slopes(const T* const (&line)[2], uint32_t pixel_bytes,
                                           const Tap<A, int32_t>& row,
                                           const Tap<A, int32_t>& column, const A (&d)[V], A& by_y,
                                           A& by_x) {
  Vector<T, V> stored[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const T* const at = advance(line[q >> 1], q & 1 ? column.high : column.low, pixel_bytes);
    stored[q] = load_if(true, reinterpret_cast<const Vector<T, V>*>(at));
  }
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    A corner[V], dot = 0;
    widen(stored[q], corner);
#pragma unroll
    for (int v = 0; v < V; ++v) dot += d[v] * corner[v];
    const A across = q & 1 ? column.fraction : A(1) - column.fraction;
    const A down = q >> 1 ? row.fraction : A(1) - row.fraction;
    // A pixel without influence may be infinite.
    if (row.within && across != A(0)) by_y += (q >> 1 ? across : -across) * dot;
    if (column.within && down != A(0)) by_x += (q & 1 ? down : -down) * dot;
  }
}

// Backward pass: adds to dx atomically, unless it is null; writes dfirst, unless it is null (x is
// then not read).
//
// 1 << shift consecutive threads share a bin and stride over its packs. V channels are 16 bytes of
// dx, so that neighboring threads add to neighboring addresses. A shuffle reduction adds up dfirst
// over the channels. No thread may return early, because all threads of a warp take part.
template <typename T, typename A, int V>
__global__ void __launch_bounds__(kThreads, 2)  // two blocks per SM leave enough registers
    roi_gradients_kernel(Boxes<T, A> in, const T* dy, A* dx, A* dfirst, int block, int shift) {
  __shared__ SharedBins<A> shared;
  const int64_t first = int64_t(blockIdx.x) * block;
  const int32_t count = static_cast<int32_t>(min(int64_t(block), in.bins - first));
  if (static_cast<int32_t>(threadIdx.x) < count) shared.put(in, first);
  __syncthreads();
  const int64_t row_size = int64_t(in.W) * in.pixel_size;
  const bool adds = dx != nullptr, moves = dfirst != nullptr;
  const int lanes = 1 << shift, lane = threadIdx.x & (lanes - 1);
#pragma unroll 1
  for (int turn = 0; turn < count; turn += kThreads >> shift) {
    const int bin = turn + (threadIdx.x >> shift);
    const A scale = bin < count ? shared.scale[bin] : A(0);
    A by_y = 0, by_x = 0;
    if (scale != A(0)) {
      const auto position = shared.position[bin];
      const auto range = shared.range[bin];
#pragma unroll 1
      for (int32_t pack = lane; pack < in.packs; pack += lanes) {
        const int64_t image = shared.channels[bin] + pack * V;
        const int64_t at = (first + bin) * in.packs + pack;
        const auto stored = load_if(true, reinterpret_cast<const Vector<T, V>*>(dy) + at);
        A d[V];
        widen(stored, d);
#pragma unroll
        for (int v = 0; v < V; ++v) d[v] *= scale;
#pragma unroll 1
        for (int32_t a = range.at[0]; a < range.at[1]; ++a) {
          const auto row = make_tap<A, int32_t>(position.at[0] + A(a) * position.at[2], in.H);
          const int64_t low = image + row.low * row_size, high = image + row.high * row_size;
          const T* const line[2] = {in.x + low, in.x + high};
          A* const to[2] = {dx + low, dx + high};
          const A by_row[2] = {A(1) - row.fraction, row.fraction};
#pragma unroll 1
          for (int32_t b = range.at[2]; b < range.at[3]; ++b) {
            const auto column = make_tap<A, int32_t>(position.at[1] + A(b) * position.at[3], in.W);
            const A by_column[2] = {A(1) - column.fraction, column.fraction};
            if (moves) {
              add_slopes<T, A, V>(line, in.pixel_size * sizeof(T), row, column, d, by_y, by_x);
            }
            if (!adds) continue;
#pragma unroll
            for (int q = 0; q < 4; ++q) {
              const A weight = by_row[q >> 1] * by_column[q & 1];
              A more[V];
#pragma unroll
              for (int v = 0; v < V; ++v) more[v] = weight * d[v];
              const int32_t pixel = q & 1 ? column.high : column.low;
              A* const sum = advance(to[q >> 1], pixel, in.pixel_size * sizeof(A));
              if (weight != A(0)) add<A, V>(sum, more);
            }
          }
        }
      }
    }
    if (!moves) continue;
#pragma unroll
    for (int step = kMostLanes / 2; step > 0; step /= 2) {
      if (step >= lanes) continue;
      by_y += __shfl_down_sync(kAllLanes, by_y, step, lanes);
      by_x += __shfl_down_sync(kAllLanes, by_x, step, lanes);
    }
    if (bin < count && lane == 0) {
      reinterpret_cast<Vector<A, 2>*>(dfirst)[first + bin] = {by_y, by_x};
    }
  }
}

// Tiles of pixels, one for each block of threads of roi_gather_kernel.
constexpr int kTileSide = 8;  // largest height and width
struct Tiles {
  int shift;           // log2 of the number of threads per pixel, at least 2
  int height, width;   // of a tile, log2
  int32_t down, across, chunks, slots;  // numbers of tiles, and of parts of the channels

  static Tiles of(const Pooling& g, int64_t packs) {
    Tiles tiles{2, 0, 0, 0, 0, 0, 0};
    while ((1 << tiles.shift) < lanes_for(packs)) ++tiles.shift;
    const int pixels = 8 - tiles.shift;  // log2 of 256 threads by threads per pixel
    tiles.height = pixels / 2;
    tiles.width = pixels - tiles.height;
    const auto parts = [](int64_t size, int shift) {
      return static_cast<int32_t>((size + (int64_t{1} << shift) - 1) >> shift);
    };
    tiles.down = parts(g.H, tiles.height);
    tiles.across = parts(g.W, tiles.width);
    tiles.chunks = parts(packs, tiles.shift);
    tiles.slots = static_cast<int32_t>(g.parts * g.parts * g.G);
    return tiles;
  }
  int64_t blocks(int64_t images) const {
    return images * down * across * chunks * slots;
  }
};
static_assert(kThreads == 256);

// The weights of a tile's pixels in up to kThreads bins: products of a row's and a column's weight.
template <typename A>
struct SharedWeights {
  A row[kThreads][kTileSide], column[kThreads][kTileSide];
  int32_t bin[kThreads];
  int32_t found[2][kThreads / 32];  // number of bins found by each warp, for two rounds

  // Stores the sum of the weights of a bin's samples for each of `size` rows or columns.
  __device__ __forceinline__ static void put(const Axis<A, int32_t>& axis, int32_t begin, int size,
                                             A scale, A (&weight)[kTileSide]) {
    for (int k = 0; k < size; ++k) weight[k] = A(0);
#pragma unroll 1
    for (int32_t i = axis.begin; i < axis.end; ++i) {
      const auto tap = make_tap<A, int32_t>(axis.at(i), axis.size);
      const uint32_t low = tap.low - begin, high = tap.high - begin;
      if (low < uint32_t(size)) weight[low] += (A(1) - tap.fraction) * scale;
      if (high < uint32_t(size)) weight[high] += tap.fraction * scale;
    }
  }
};

// Returns true if samples of a bin may touch pixels begin to end - 1 along one axis: if the first
// and the last one do not both lie beyond the same side. False for NaN.
template <typename A>
__device__ __forceinline__ bool may_touch(A first, A step, A count, int32_t begin, int32_t end) {
  const A last = first + ((count < A(1 << 20) ? count : A(1 << 20)) - A(1)) * step;
  const A low = first < last ? first : last, high = first < last ? last : first;
  return high >= A(begin) - A(1) && low <= A(end);
}

// Deterministic gradient of x: computes dx in a fixed order, without atomics.
//
// Each block of threads computes a tile of pixels, for a part of the channels. In each round, it
// searches the next kThreads bins of the image for those with samples near the tile, computes their
// weights for the tile's rows and columns, and adds them up in the order of the bins.
template <typename T, typename A, int V>
__global__ void __launch_bounds__(kThreads, 2)
    roi_gather_kernel(Boxes<T, A> in, const T* dy, A* dx, Tiles tiles) {
  __shared__ SharedWeights<A> shared;
  int32_t index = static_cast<int32_t>(blockIdx.x);
  const auto next = [&](int32_t size) {  // returns the index along the next axis
    const int32_t rest = index / size, at = index - rest * size;
    index = rest;
    return at;
  };
  const int32_t left = next(tiles.across) << tiles.width, top = next(tiles.down) << tiles.height;
  const int32_t chunk = next(tiles.chunks), group = next(in.by_G.d);
  const int32_t part = next(in.parts * in.parts), n = index;

  const int32_t width = 1 << tiles.width, height = 1 << tiles.height;
  const int32_t thread = static_cast<int32_t>(threadIdx.x), pixel = thread >> tiles.shift;
  const int32_t column = pixel & (width - 1), row = pixel >> tiles.width;
  const int32_t pack = (chunk << tiles.shift) + (thread & ((1 << tiles.shift) - 1));
  const bool active = top + row < in.H && left + column < in.W && pack < in.packs;

  const int32_t bins = in.by_R.d * in.by_P.d;  // of an image
  const int64_t first_bin = int64_t(n) * bins;
  const auto* const from = reinterpret_cast<const Vector<T, V>*>(dy) +
                           (first_bin * in.by_G.d + group) * in.packs + pack;
  const uint32_t bin_bytes = in.by_G.d * in.packs * uint32_t{sizeof(Vector<T, V>)};
  A sum[V] = {};
  int parity = 0;
#pragma unroll 1
  for (int32_t begin = 0; begin < bins; begin += kThreads) {
    const int32_t bin = begin + thread, r = in.by_P.quotient(bin < bins ? bin : 0);
    Axis<A, int32_t> y{}, x{};
    A scale = 0;
    if (bin < bins && (in.parts == 1 || in.block_of(bin - r * in.by_P.d) == part)) {
      const int64_t at = (first_bin + bin) * in.by_G.d + group;
      const int32_t box = n * in.by_R.d + r;
      const auto start = load<A, 2>(in.first + 2 * at);
      const auto by = load<A, 2>(in.step + 2 * int64_t(box));
      const auto most = load<A, 2>(in.count + 2 * int64_t(box));
      if (may_touch(start.at[0], by.at[0], most.at[0], top, top + height) &&
          may_touch(start.at[1], by.at[1], most.at[1], left, left + width)) {
        scale = in.axes(at, box, y, x);
      }
    }
    const unsigned hits = __ballot_sync(kAllLanes, scale != A(0));
    if (thread % 32 == 0) shared.found[parity][thread / 32] = __popc(hits);
    __syncthreads();
    int32_t place = __popc(hits & ((1u << (thread % 32)) - 1)), count = 0;
    for (int w = 0; w < kThreads / 32; ++w) {
      place += w < thread / 32 ? shared.found[parity][w] : 0;
      count += shared.found[parity][w];
    }
    parity ^= 1;  // other threads may still read `found` during the next round
    if (count == 0) continue;
    if (scale != A(0)) {
      shared.put(y, top, height, scale, shared.row[place]);
      shared.put(x, left, width, A(1), shared.column[place]);
      shared.bin[place] = bin;
    }
    __syncthreads();
#pragma unroll 1
    for (int32_t e = 0; active && e < count; e += 4) {
      Vector<T, V> stored[4];
      A weight[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int32_t entry = e + k < count ? e + k : e;
        const A product = shared.row[entry][row] * shared.column[entry][column];
        weight[k] = e + k < count ? product : A(0);
        stored[k] = load_if(weight[k] != A(0), advance(from, shared.bin[entry], bin_bytes));
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        A d[V];
        widen(stored[k], d);
#pragma unroll
        for (int v = 0; v < V; ++v) sum[v] += weight[k] * d[v];
      }
    }
    __syncthreads();
  }
  if (!active) return;
  Vector<A, V> out;
#pragma unroll
  for (int v = 0; v < V; ++v) out.at[v] = sum[v];
  const int64_t at = (int64_t(n) * in.H + top + row) * in.W + left + column;
  A* const to = dx + at * in.pixel_size + part * in.g.C + group * (in.g.C / in.g.G) + pack * V;
  *reinterpret_cast<Vector<A, V>*>(to) = out;
}

// Returns the arguments of the kernels, for packs of V channels.
template <typename T, typename A, int V>
Boxes<T, A> make_boxes(const Pooling& g, const void* x, const void* first, const void* step,
                       const void* count) {
  const auto by = [](int64_t size) { return Divisor<int32_t>(static_cast<int32_t>(size)); };
  const int64_t packs = g.C / g.G / V;
  return {g,
          static_cast<const T*>(x),
          static_cast<const A*>(first),
          static_cast<const A*>(step),
          static_cast<const A*>(count),
          g.N * g.R * g.P * g.G,
          static_cast<int32_t>(packs),
          static_cast<int32_t>(g.H), static_cast<int32_t>(g.W), static_cast<int32_t>(g.parts),
          static_cast<int32_t>(g.pixel_size()),
          by(packs), by(g.P * g.G), by(g.P), by(g.G), by(g.R), by(g.rows), by(g.columns)};
}

}  // namespace effjax

#endif  // EFFJAX_ROI_CUDA_H_
