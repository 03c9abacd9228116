// CUDA kernels of deformable attention.
//
// A group of `lanes` threads of one warp computes one head of one query. In each turn, every thread
// of the group computes the position of one of the next `lanes` samples and shares it with the
// group in shared memory. The group then visits these samples one by one, with one pack of channels
// per thread.
#ifndef EFFJAX_DEFORM_ATTENTION_CUDA_H_
#define EFFJAX_DEFORM_ATTENTION_CUDA_H_

#include "cuda.h"
#include "deform_attention.h"

namespace effjax {

constexpr int kMostLevels = 32;

// Arguments of the kernels. Indices within an image are 32-bit, offsets of images 64-bit.
template <typename T, typename A, int V>
struct AttentionArrays {
  const T* value;         // [N, S, M, D]
  const A* locations;     // [N, Q, M, L, P, 2]
  const A* weights;       // [N, Q, M, L, P]
  int64_t image;          // elements of one image of value: S * M * D
  int32_t heads;          // N * Q * M
  int32_t packs;          // packs per head: D / V
  int32_t pixel_size;     // elements of one pixel of value: M * D
  int32_t points;         // L * P
  int32_t levels, shift;  // shift: log2 of the number of threads per head
  bool normalized;
  Divisor<int32_t> by_heads_of_image, by_M, by_P, by_points;  // Q * M, M, P, L * P
  int32_t height[kMostLevels], width[kMostLevels], start[kMostLevels];

  // Returns the offset in value of the channels of a head in pixel 0 of its image.
  __device__ __forceinline__ int64_t channels(int32_t head) const {
    const int32_t n = by_heads_of_image.quotient(head), m = head - by_M.quotient(head) * by_M.d;
    return n * image + m * packs * V;
  }

  // Computes the position of sample `point` of a head in pixels, and returns its attention weight.
  __device__ __forceinline__ A position(int32_t head, int32_t point, int32_t level, A& y,
                                        A& x) const {
    const int64_t at = int64_t(head) * points + point;
    const auto location = load<A, 2>(locations + 2 * at);
    x = location.at[0];
    y = location.at[1];
    if (normalized) {
      x = x * A(width[level]) - A(0.5);
      y = y * A(height[level]) - A(0.5);
    }
    return weights[at];
  }
};

// Smallest number of threads per head in attend_backward_kernel, for sum_of_group.
constexpr int kLeastLanes = 4;

// The samples of a block in shared memory, each with its four pixels.
template <typename A>
struct SharedPoints {
  Vector<int32_t, 4> pixel[kThreads];  // counted from the start of the image, or -1 outside
  Vector<A, 4> weight[kThreads];       // bilinear weight times attention weight

  __device__ __forceinline__ void put(int at, const Sample<A, int32_t>& s, int32_t start,
                                      A attention) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      pixel[at].at[q] = s.inside[q] ? start + s.pixel[q] : -1;
      weight[at].at[q] = s.inside[q] ? attention * s.weight[q] : A(0);
    }
  }
};

// Computes sample `point` of a head and shares it with the group. Returns its attention weight.
template <typename T, typename A, int V>
__device__ __forceinline__ A share_sample(const AttentionArrays<T, A, V>& in, int32_t head,
                                          int32_t point, int32_t level, Sample<A, int32_t>& s,
                                          SharedPoints<A>& shared) {
  A y, x;
  const A attention = in.position(head, point, level, y, x);
  make_sample<A, int32_t>(y, x, in.height[level], in.width[level], s);
  shared.put(threadIdx.x, s, in.start[level], attention);
  return attention;
}

// Loads one pack of each of the four pixels of a sample, zeros outside. All four loads are issued
// before the first result is used, to hide their latency. `from` is the pack of pixel 0.
template <typename T, typename A, int V>
__device__ __forceinline__ void load_pixels(const Vector<T, V>* from,
                                            const Vector<int32_t, 4>& pixel, uint32_t pixel_bytes,
                                            A (&corner)[4][V]) {
  Vector<T, V> stored[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    stored[q] = load_if(pixel.at[q] >= 0, advance(from, pixel.at[q], pixel_bytes));
  }
#pragma unroll
  for (int q = 0; q < 4; ++q) widen(stored[q], corner[q]);
}

// Forward pass: computes y [N, Q, M, D].
//
// Thread layout: 1 << shift consecutive threads per head, packs of channels strided by that number.
// All threads of a warp run the same number of turns and reach every __syncwarp, also those past
// the last head or the last pack.
template <typename T, typename A, int V>
__global__ void __launch_bounds__(kThreads, 3)  // leaves enough registers for loads in flight
    attend_kernel(AttentionArrays<T, A, V> in, T* y) {
  __shared__ SharedPoints<A> shared;
  const int32_t lanes = 1 << in.shift, lane = threadIdx.x & (lanes - 1);
  const int32_t begin = threadIdx.x & ~(lanes - 1);
  const int64_t group = (int64_t(blockIdx.x) * kThreads + threadIdx.x) >> in.shift;
  const bool active = group < in.heads;
  const int32_t head = active ? static_cast<int32_t>(group) : 0;
  const auto* const value = reinterpret_cast<const Vector<T, V>*>(in.value + in.channels(head));
  const uint32_t pixel_bytes = in.pixel_size * sizeof(T);
#pragma unroll 1
  for (int32_t pack = lane; pack - lane < in.packs; pack += lanes) {
    const bool has_pack = active && pack < in.packs;
    const auto* const from = value + pack;
    A sum[V] = {};
#pragma unroll 1
    for (int32_t first = 0; first < in.points; first += lanes) {
      const int32_t point = first + lane, count = min(lanes, in.points - first);
      __syncwarp();
      if (active && point < in.points) {
        Sample<A, int32_t> s;
        share_sample(in, head, point, in.by_P.quotient(point), s, shared);
      }
      __syncwarp();
      if (!has_pack) continue;
#pragma unroll 1
      for (int32_t i = 0; i < count; ++i) {
        const auto weight = shared.weight[begin + i];
        A corner[4][V];
        load_pixels<T, A, V>(from, shared.pixel[begin + i], pixel_bytes, corner);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
#pragma unroll
          for (int v = 0; v < V; ++v) sum[v] += weight.at[q] * corner[q][v];
        }
      }
    }
    if (!has_pack) continue;
    Vector<T, V> out;
#pragma unroll
    for (int v = 0; v < V; ++v) narrow(sum[v], out.at[v]);
    reinterpret_cast<Vector<T, V>*>(y)[int64_t(head) * in.packs + pack] = out;
  }
}

// Adds the gradient of one pack to dvalue (if `adds`), and the products of dy with the four pixels to
// `product`.
template <typename T, typename A, int V>
__device__ __forceinline__ void scatter_pack(const Vector<T, V>* value,
                                             const Vector<int32_t, 4>& pixel,
                                             const Vector<A, 4>& weight, const Vector<T, V>* dy,
                                             uint32_t pixel_size, A* dvalue, bool adds,
                                             A product[4]) {
  const auto stored = load_if(true, dy);
  A corner[4][V], d[V];
  load_pixels<T, A, V>(value, pixel, pixel_size * sizeof(T), corner);
  widen(stored, d);
#pragma unroll
  for (int q = 0; q < 4; ++q) {
#pragma unroll
    for (int v = 0; v < V; ++v) product[q] += d[v] * corner[q][v];
  }
  if (!adds) return;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    A more[V];
#pragma unroll
    for (int v = 0; v < V; ++v) more[v] = weight.at[q] * d[v];
    A* const to = advance(dvalue, pixel.at[q], pixel_size * sizeof(A));
    if (pixel.at[q] >= 0) add<A, V>(to, more);
  }
}

// Backward pass: adds to dvalue atomically, unless it is null; writes dlocations and dweights.
//
// Thread layout as in attend_kernel, but at least four threads per head. V channels are 16 bytes of dvalue, so that neighboring threads
// add to neighboring addresses. A shuffle reduction over the group adds up the products of a sample
// over its channels; the thread that computed the sample's position then turns them into gradients.
// No thread may return early, because all threads of a warp take part in the shuffles.
template <typename T, typename A, int V>
__global__ void __launch_bounds__(kThreads, 2)  // two blocks per SM leave enough registers
    attend_backward_kernel(AttentionArrays<T, A, V> in, const T* dy, A* dvalue, A* dlocations,
                           A* dweights) {
  __shared__ SharedPoints<A> shared;
  __shared__ Vector<A, 4> products[kThreads];
  const int32_t lanes = 1 << in.shift, lane = threadIdx.x & (lanes - 1);
  const int32_t begin = threadIdx.x & ~(lanes - 1);
  const int64_t group = (int64_t(blockIdx.x) * kThreads + threadIdx.x) >> in.shift;
  const bool active = group < in.heads;
  const int32_t head = active ? static_cast<int32_t>(group) : 0, packs = active ? in.packs : 0;
  const int64_t base = in.channels(head);
  const auto* const d = reinterpret_cast<const Vector<T, V>*>(dy) + int64_t(head) * in.packs;
  const auto* const value = reinterpret_cast<const Vector<T, V>*>(in.value + base);
#pragma unroll 1
  for (int32_t first = 0; first < in.points; first += lanes) {
    const int32_t point = first + lane, level = in.by_P.quotient(point);
    const int32_t count = min(lanes, in.points - first);
    const bool mine = active && point < in.points;
    Sample<A, int32_t> s;
    A attention = 0;
    __syncwarp();
    if (mine) attention = share_sample(in, head, point, level, s, shared);
    __syncwarp();
#pragma unroll 1
    for (int32_t i = 0; i < count; ++i) {
      const auto pixel = shared.pixel[begin + i];
      const auto weight = shared.weight[begin + i];
      A product[4] = {};
#pragma unroll 1
      for (int32_t pack = lane; pack < packs; pack += lanes) {
        scatter_pack<T, A, V>(value + pack, pixel, weight, d + pack, in.pixel_size,
                              dvalue + base + pack * V, dvalue != nullptr, product);
      }
      int q;
      const A sum = sum_of_group(product, lanes, q);
      if (lane < 4) products[begin + i].at[q] = sum;
    }
    __syncwarp();
    if (!mine) continue;
    A dy_at, dx_at, dweight;
    sample_gradients<A, int32_t>(s, products[threadIdx.x].at, attention, dy_at, dx_at, dweight);
    const bool touches = s.inside[0] | s.inside[1] | s.inside[2] | s.inside[3];
    if (in.normalized) {
      dx_at *= A(in.width[level]);
      dy_at *= A(in.height[level]);
    }
    const int64_t at = int64_t(head) * in.points + point;
    Vector<A, 2> moved;
    moved.at[0] = touches ? dx_at : A(0);
    moved.at[1] = touches ? dy_at : A(0);
    reinterpret_cast<Vector<A, 2>*>(dlocations)[at] = moved;
    dweights[at] = dweight;
  }
}

// Number of entries that a thread of attend_scatter_kernel reads at a time.
constexpr int kEntries = 4;

// Deterministic gradient of value: adds to dvalue in a fixed order, without atomics.
//
// destination [N, M, corners] holds the pixel of each corner of each sample, sorted, and `source`
// the sample, numbered over [Q, L, P]. 1 << shift threads are assigned to each entry. Those at the
// first entry of a pixel add up all entries of that pixel; all other threads return. Entries for
// corners outside have destination S. Each image and head takes `blocks` blocks.
//
// The weight of a pixel is a function of its distance from the sample, which is continuous. Another
// rounding of the position, by the program that computed `destination`, therefore does no harm.
template <typename T, typename A, int V>
__global__ void __launch_bounds__(kThreads, 2)
    attend_scatter_kernel(AttentionArrays<T, A, V> in, const T* dy, const int32_t* destination,
                          const int32_t* source, A* dvalue, int32_t pixels, int32_t corners,
                          Divisor<int32_t> by_blocks) {
  const int32_t image_head = by_blocks.quotient(static_cast<int32_t>(blockIdx.x));
  const int32_t block = static_cast<int32_t>(blockIdx.x) - image_head * by_blocks.d;
  const int64_t thread = int64_t(block) * kThreads + threadIdx.x, first = thread >> in.shift;
  const int32_t lanes = 1 << in.shift, lane = threadIdx.x & (lanes - 1);
  if (first >= corners) return;
  destination += int64_t(image_head) * corners;
  source += int64_t(image_head) * corners;
  const int32_t pixel = destination[first];
  if (pixel >= pixels || (first > 0 && destination[first - 1] == pixel)) return;
  int32_t level = 0;
  while (level + 1 < in.levels && pixel >= in.start[level + 1]) ++level;
  const int32_t width = in.width[level], row = (pixel - in.start[level]) / width;
  const A py = A(row), px = A(pixel - in.start[level] - row * width);
  const int32_t n = in.by_M.quotient(image_head), m = image_head - n * in.by_M.d;
  const int32_t head_0 = n * in.by_heads_of_image.d + m;
  A* const out = dvalue + n * in.image + int64_t(pixel) * in.pixel_size + m * in.packs * V;
#pragma unroll 1
  for (int32_t pack = lane; pack < in.packs; pack += lanes) {
    A sum[V] = {};
    bool more = true;
#pragma unroll 1
    for (int64_t e = first; more; e += kEntries) {
      Vector<T, V> stored[kEntries];
      A weight[kEntries];
#pragma unroll
      for (int k = 0; k < kEntries; ++k) {
        more = e + k < corners && destination[e + k] == pixel;
        const int32_t sample = more ? source[e + k] : source[first];
        const int32_t query = in.by_points.quotient(sample);
        const int32_t head = head_0 + query * in.by_M.d;
        A y, x;
        const A attention = in.position(head, sample - query * in.points, level, y, x);
        const A near_y = A(1) - fabs(y - py), near_x = A(1) - fabs(x - px);
        // Also zero for NaN, which does not occur here.
        const bool near = (near_y > A(0)) & (near_x > A(0)) & more;
        weight[k] = near ? attention * (near_y * near_x) : A(0);
        const T* const d = dy + (int64_t(head) * in.packs + pack) * V;
        stored[k] = load_if(near, reinterpret_cast<const Vector<T, V>*>(d));
      }
#pragma unroll
      for (int k = 0; k < kEntries; ++k) {
        A d[V];
        widen(stored[k], d);
#pragma unroll
        for (int v = 0; v < V; ++v) sum[v] += weight[k] * d[v];
      }
    }
    Vector<A, V>* const to = reinterpret_cast<Vector<A, V>*>(out) + pack;
    Vector<A, V> total = *to;
#pragma unroll
    for (int v = 0; v < V; ++v) total.at[v] += sum[v];
    *to = total;
  }
}

// Returns the arguments of the kernels, with at least `least_lanes` threads per head.
template <typename T, typename A, int V>
AttentionArrays<T, A, V> attention_arrays(const Attention& g, const void* value,
                                          const void* locations, const void* weights,
                                          int least_lanes = 1) {
  const auto by = [](int64_t size) { return Divisor<int32_t>(static_cast<int32_t>(size)); };
  const auto packs = static_cast<int32_t>(g.D / V);
  AttentionArrays<T, A, V> in{static_cast<const T*>(value),
                              static_cast<const A*>(locations),
                              static_cast<const A*>(weights),
                              g.S * g.M * g.D,
                              static_cast<int32_t>(g.N * g.Q * g.M),
                              packs,
                              static_cast<int32_t>(g.M * g.D),
                              static_cast<int32_t>(g.points()),
                              static_cast<int32_t>(g.levels.size()),
                              0,
                              g.normalized,
                              by(g.Q * g.M), by(g.M), by(g.P), by(g.points()), {}, {}, {}};
  while ((1 << in.shift) < std::max(lanes_for(packs), least_lanes)) ++in.shift;
  int32_t start = 0;
  for (size_t l = 0; l < g.levels.size(); ++l) {
    in.height[l] = static_cast<int32_t>(g.levels[l].height);
    in.width[l] = static_cast<int32_t>(g.levels[l].width);
    in.start[l] = start;
    start += in.height[l] * in.width[l];
  }
  return in;
}

// Returns the number of blocks of attend_scatter_kernel for each image and head.
inline int64_t scatter_blocks(int64_t corners, int shift) {
  const int64_t entries = kThreads >> shift;
  return (corners + entries - 1) / entries;
}

}  // namespace effjax

#endif  // EFFJAX_DEFORM_ATTENTION_CUDA_H_
