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
  const T* value;      // [N, S, M, D]
  const A* locations;  // [N, Q, M, L, P, 2]
  const A* weights;    // [N, Q, M, L, P]
  int64_t image;       // elements of one image of value: S * M * D
  int32_t heads;       // N * Q * M
  int32_t heads_of_image, M, P, points;
  int32_t packs;   // packs per head: D / V
  int32_t shift;   // log2 of the number of threads per head
  bool normalized;
  int32_t height[kMostLevels], width[kMostLevels], start[kMostLevels];

  __device__ int32_t stride() const { return M * packs * V; }

  // Computes sample `point` of a head, with pixels counted from the start of its level. Returns its
  // attention weight.
  __device__ A sample(int64_t head, int32_t point, int32_t level, Sample<A>& s) const {
    const int64_t at = head * points + point;
    A x = locations[2 * at], y = locations[2 * at + 1];
    if (normalized) {
      x = x * A(width[level]) - A(0.5);
      y = y * A(height[level]) - A(0.5);
    }
    make_sample<A>(y, x, height[level], width[level], s);
    return weights[at];
  }
};

// A sample in shared memory. Pixels are counted from the start of the image; -1 means outside.
template <typename A>
struct alignas(16) SharedSample {
  int32_t pixel[4];
  A weight[4];  // bilinear weight times attention weight
};

template <typename T, typename A, int V>
__device__ __forceinline__ void share(const AttentionArrays<T, A, V>& in, const Sample<A>& s,
                                      int32_t level, A attention, SharedSample<A>& to) {
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    to.pixel[q] = s.inside[q] ? in.start[level] + static_cast<int32_t>(s.pixel[q]) : -1;
    to.weight[q] = s.inside[q] ? attention * s.weight[q] : A(0);
  }
}

// Forward pass: computes y [N, Q, M, D].
//
// Thread layout: 1 << shift consecutive threads per head, packs of channels strided by that number.
// All threads of a warp run the same number of turns and reach every __syncwarp, also those past
// the last head or the last pack.
template <typename T, typename A, int V>
__global__ void __launch_bounds__(kThreads, 2)  // two blocks per SM leave enough registers
    attend_kernel(AttentionArrays<T, A, V> in, T* y) {
  __shared__ SharedSample<A> shared[kThreads];
  const int32_t lanes = 1 << in.shift, lane = threadIdx.x & (lanes - 1);
  const int64_t head = (int64_t(blockIdx.x) * kThreads + threadIdx.x) >> in.shift;
  const bool active = head < in.heads;
  const int32_t n = static_cast<int32_t>(head) / in.heads_of_image;
  const int32_t m = static_cast<int32_t>(head) % in.M, stride = in.stride();
  SharedSample<A>* const mine = shared + (threadIdx.x & ~(lanes - 1));
  for (int32_t pack = lane; pack - lane < in.packs; pack += lanes) {
    const bool has_pack = active && pack < in.packs;
    const T* const from = in.value + n * in.image + (m * in.packs + pack) * V;
    A sum[V] = {};
    for (int32_t first = 0; first < in.points; first += lanes) {
      const int32_t point = first + lane, count = min(lanes, in.points - first);
      __syncwarp();
      if (active && point < in.points) {
        Sample<A> s;
        const int32_t level = point / in.P;
        const A attention = in.sample(head, point, level, s);
        share(in, s, level, attention, mine[lane]);
      }
      __syncwarp();
      if (!has_pack) continue;
#pragma unroll 2
      for (int32_t i = 0; i < count; ++i) {
        const SharedSample<A> s = mine[i];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          if (s.pixel[q] < 0) continue;
          const auto value = load<T, V>(from + int64_t(s.pixel[q]) * stride);
#pragma unroll
          for (int v = 0; v < V; ++v) sum[v] += s.weight[q] * widen(value.at[v]);
        }
      }
    }
    if (!has_pack) continue;
    Vector<T, V> out;
#pragma unroll
    for (int v = 0; v < V; ++v) narrow(sum[v], out.at[v]);
    reinterpret_cast<Vector<T, V>*>(y)[head * in.packs + pack] = out;
  }
}

// Adds the gradient of one sample to dvalue, and the products of dy with the sample's four pixels
// to `product`, both for the channels of this thread.
template <typename T, typename A, int V>
__device__ __forceinline__ void scatter_sample(const AttentionArrays<T, A, V>& in,
                                               const SharedSample<A>& s, const T* dy,
                                               const T* value, A* dvalue, int32_t lane,
                                               int32_t lanes, A product[4]) {
  for (int32_t pack = lane; pack < in.packs; pack += lanes) {
    const auto d = load<T, V>(dy + pack * V);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      if (s.pixel[q] < 0) continue;
      const int64_t at = int64_t(s.pixel[q]) * in.stride() + pack * V;
      const auto pixel = load<T, V>(value + at);
      A more[V];
#pragma unroll
      for (int v = 0; v < V; ++v) {
        product[q] += widen(d.at[v]) * widen(pixel.at[v]);
        more[v] = s.weight[q] * widen(d.at[v]);
      }
      add<A, V>(dvalue + at, more);
    }
  }
}

// Backward pass: adds to dvalue atomically; writes dlocations and dweights.
//
// Thread layout as in attend_kernel. A shuffle reduction over the group adds up the products of a
// sample over its channels; the thread that computed the sample's position then turns them into
// gradients. No thread may return early, because all threads of a warp take part in the shuffles.
template <typename T, typename A, int V>
__global__ void __launch_bounds__(kThreads, 2)
    attend_backward_kernel(AttentionArrays<T, A, V> in, const T* dy, A* dvalue, A* dlocations,
                           A* dweights) {
  __shared__ SharedSample<A> shared[kThreads];
  __shared__ A products[kThreads][4];
  const int32_t lanes = 1 << in.shift, lane = threadIdx.x & (lanes - 1);
  const int64_t head = (int64_t(blockIdx.x) * kThreads + threadIdx.x) >> in.shift;
  const bool active = head < in.heads;
  const int32_t n = static_cast<int32_t>(head) / in.heads_of_image;
  const int32_t m = static_cast<int32_t>(head) % in.M;
  const int32_t begin = threadIdx.x & ~(lanes - 1);
  const int64_t base = n * in.image + m * in.packs * V;
  for (int32_t first = 0; first < in.points; first += lanes) {
    const int32_t point = first + lane, level = point / in.P, count = min(lanes, in.points - first);
    const bool mine = active && point < in.points;
    Sample<A> s;
    A attention = 0;
    __syncwarp();
    if (mine) {
      attention = in.sample(head, point, level, s);
      share(in, s, level, attention, shared[threadIdx.x]);
    }
    __syncwarp();
    for (int32_t i = 0; i < count; ++i) {
      A product[4] = {};
      if (active) {
        scatter_sample(in, shared[begin + i], dy + head * in.packs * V, in.value + base,
                       dvalue + base, lane, lanes, product);
      }
      for (int step = lanes / 2; step > 0; step /= 2) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          product[q] += __shfl_down_sync(kAllLanes, product[q], step, lanes);
        }
      }
      if (lane == 0) {
#pragma unroll
        for (int q = 0; q < 4; ++q) products[begin + i][q] = product[q];
      }
    }
    __syncwarp();
    if (!mine) continue;
    A dy_at, dx_at, dweight;
    sample_gradients<A>(s, products[threadIdx.x], attention, dy_at, dx_at, dweight);
    const bool touches = s.inside[0] | s.inside[1] | s.inside[2] | s.inside[3];
    const int64_t at = head * in.points + point;
    dlocations[2 * at] = touches ? (in.normalized ? dx_at * A(in.width[level]) : dx_at) : A(0);
    dlocations[2 * at + 1] = touches ? (in.normalized ? dy_at * A(in.height[level]) : dy_at) : A(0);
    dweights[at] = dweight;
  }
}

// Returns the arguments of the kernels.
template <typename T, typename A, int V>
AttentionArrays<T, A, V> attention_arrays(const Attention& g, const void* value,
                                          const void* locations, const void* weights) {
  AttentionArrays<T, A, V> in{};
  in.value = static_cast<const T*>(value);
  in.locations = static_cast<const A*>(locations);
  in.weights = static_cast<const A*>(weights);
  in.image = g.S * g.M * g.D;
  in.heads = static_cast<int32_t>(g.N * g.Q * g.M);
  in.heads_of_image = static_cast<int32_t>(g.Q * g.M);
  in.M = static_cast<int32_t>(g.M);
  in.P = static_cast<int32_t>(g.P);
  in.points = static_cast<int32_t>(g.points());
  in.packs = static_cast<int32_t>(g.D / V);
  in.normalized = g.normalized;
  while ((1 << in.shift) < lanes_for(in.packs)) ++in.shift;
  int32_t start = 0;
  for (size_t l = 0; l < g.levels.size(); ++l) {
    in.height[l] = static_cast<int32_t>(g.levels[l].height);
    in.width[l] = static_cast<int32_t>(g.levels[l].width);
    in.start[l] = start;
    start += in.height[l] * in.width[l];
  }
  return in;
}

}  // namespace effjax

#endif  // EFFJAX_DEFORM_ATTENTION_CUDA_H_
