// The kernels of deformable convolution on a GPU.
#ifndef EFFJAX_DEFORM_CONV_CUDA_H_
#define EFFJAX_DEFORM_CONV_CUDA_H_

#include "cuda.h"
#include "deform_conv.h"

namespace effjax {

// The operands, and how they are indexed. A "pack" is V channels, the part of one thread.
template <typename T, typename A, int V>
struct Operands {
  Geometry g;
  const T* x;
  const A* offset;
  const A* mask;
  const int32_t* first_row;
  int64_t packs;  // of a group's channels: C / G / V

  // The sample of tap k of group `group` at output point `point` of [N, R, Wo].
  __device__ bool sample(int64_t point, int64_t group, int64_t k, Sample<A>& s, A& factor) const {
    const int64_t column = point % g.Wo, r = point / g.Wo % g.R;
    const int64_t tap = (point * g.G + group) * g.K + k;
    const A y = base_y<A>(g, *first_row + r, k) + offset[2 * tap];
    const A x = base_x<A>(g, column, k) + offset[2 * tap + 1];
    factor = g.has_mask ? mask[tap] : A(1);
    return make_sample<A>(y, x, g.H, g.W, s);
  }
  // Where the channels of a pack of a pixel of the point's image begin.
  __device__ int64_t address(int64_t point, int64_t pixel, int64_t group, int64_t pack) const {
    const int64_t n = point / (g.R * g.Wo);
    return (n * g.H * g.W + pixel) * g.C + (group * packs + pack) * V;
  }
};

// One thread a pack of the columns, in their order: writes are contiguous.
template <typename T, typename A, int V>
__global__ void __launch_bounds__(kThreads) columns_kernel(Operands<T, A, V> in, T* columns,
                                                           int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const Geometry& g = in.g;
  const int64_t pack = i % in.packs, group = i / in.packs % g.G;
  const int64_t k = i / (in.packs * g.G) % g.K, point = i / (in.packs * g.G * g.K);
  A sum[V] = {};
  Sample<A> s;
  A factor;
  if (in.sample(point, group, k, s, factor)) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      if (!s.inside[q]) continue;
      const auto value = load<T, V>(in.x + in.address(point, s.pixel[q], group, pack));
      const A weight = factor * s.weight[q];
#pragma unroll
      for (int v = 0; v < V; ++v) sum[v] += weight * widen(value.at[v]);
    }
  }
  Vector<T, V> out;
#pragma unroll
  for (int v = 0; v < V; ++v) narrow(sum[v], out.at[v]);
  reinterpret_cast<Vector<T, V>*>(columns)[i] = out;
}

// `lanes` threads, a power of two, for each tap of each group of each point: they share the sums over
// channels that the gradients of its position and mask are.
template <typename T, typename A, int V>
__global__ void __launch_bounds__(kThreads, 2)  // two blocks at a time leave enough registers
    gradients_kernel(Operands<T, A, V> in, const A* dcolumns, A* dx, A* doffset, A* dmask,
                     int64_t count, int lanes, bool skip_dx) {
  const Geometry& g = in.g;
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t i = thread / lanes, lane = thread % lanes;
  const bool active = i < count;  // all threads of a warp take part in its shuffles
  const int64_t k = i % g.K, group = i / g.K % g.G, point = i / (g.K * g.G);
  A product[4] = {};
  Sample<A> s;
  A factor;
  const bool inside = active && in.sample(point, group, k, s, factor);
  if (inside) {
    for (int64_t pack = lane; pack < in.packs; pack += lanes) {
      const int64_t at = (point * g.K + k) * g.C + (group * in.packs + pack) * V;
      const auto d = load<A, V>(dcolumns + at);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        if (!s.inside[q]) continue;
        const int64_t address = in.address(point, s.pixel[q], group, pack);
        const auto value = load<T, V>(in.x + address);
        A more[V];
#pragma unroll
        for (int v = 0; v < V; ++v) {
          product[q] += d.at[v] * widen(value.at[v]);
          more[v] = factor * s.weight[q] * d.at[v];
        }
        if (!skip_dx) add<A, V>(dx + address, more);
      }
    }
  }
  for (int step = lanes / 2; step > 0; step /= 2) {
#pragma unroll
    for (int q = 0; q < 4; ++q) product[q] += __shfl_down_sync(kAllLanes, product[q], step, lanes);
  }
  if (!active || lane != 0) return;
  A dy = 0, dx_position = 0, dfactor = 0;
  if (inside) sample_gradients<A>(s, product, factor, dy, dx_position, dfactor);
  const int64_t tap = (point * g.G + group) * g.K + k;
  doffset[2 * tap] = dy;
  doffset[2 * tap + 1] = dx_position;
  if (g.has_mask) dmask[tap] = dfactor;
}

// `lanes` threads for each corner of each sample, in the order of the pixels that the corners are:
// the first corner of a pixel adds all of them, one after the other.
template <typename A, int V>
__global__ void __launch_bounds__(kThreads, 2)
    scatter_kernel(Operands<A, A, V> in, const A* dcolumns, const int32_t* destination,
                   const int32_t* source, A* dx, int64_t corners, int64_t count, int lanes) {
  const Geometry& g = in.g;
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t i = thread / lanes, lane = thread % lanes;
  if (i >= count) return;
  const int64_t image_group = i / corners, first = i % corners;
  destination += image_group * corners;
  source += image_group * corners;
  const int32_t pixel = destination[first];
  if (pixel >= g.H * g.W || (first > 0 && destination[first - 1] == pixel)) return;
  const int64_t group = image_group % g.G, image = image_group / g.G * g.R * g.Wo;
  for (int64_t pack = lane; pack < in.packs; pack += lanes) {
    A sum[V] = {};
    for (int64_t e = first; e < corners && destination[e] == pixel; ++e) {
      const int32_t q = source[e] % 4;
      const int64_t k = source[e] / 4 % g.K, point = image + source[e] / 4 / g.K;
      Sample<A> s;
      A factor;
      if (!in.sample(point, group, k, s, factor)) continue;
      const auto d = load<A, V>(dcolumns + (point * g.K + k) * g.C + (group * in.packs + pack) * V);
      // Without an index that only the run knows: that would put the sample into memory.
      const A left = q < 2 ? s.weight[0] : s.weight[2], right = q < 2 ? s.weight[1] : s.weight[3];
      const A weight = factor * (q % 2 ? right : left);
#pragma unroll
      for (int v = 0; v < V; ++v) sum[v] += weight * d.at[v];
    }
    A* out = dx + in.address(image, pixel, group, pack);
#pragma unroll
    for (int v = 0; v < V; ++v) out[v] += sum[v];
  }
}

}  // namespace effjax

#endif  // EFFJAX_DEFORM_CONV_CUDA_H_
