// CUDA kernels of deformable convolution.
//
// Samples are numbered like the columns, [N, R, Wo, K, G]. A block of threads handles a range of
// consecutive samples. First, each thread computes the position of one sample and stores it in
// shared memory. Then the threads visit the packs of channels of all these samples.
#ifndef EFFJAX_DEFORM_CONV_CUDA_H_
#define EFFJAX_DEFORM_CONV_CUDA_H_

#include "cuda.h"
#include "deform_conv.h"

namespace effjax {

// Arguments of the kernels. I is the type of indices: 32-bit if all of them fit. A pack is the V
// channels that one thread handles at a time.
template <typename T, typename A, int V, typename I>
struct Operands {
  Geometry g;
  const T* x;                // [N, H, W, C]
  const A* offset;           // [N, Ho, Wo, G, K, 2], (y, x)
  const A* mask;             // [N, Ho, Wo, G, K]; not read without g.has_mask
  const int32_t* first_row;  // one number: the first output row of this call
  I samples;  // number of samples
  I packs;    // packs per group: C / G / V
  Divisor<I> by_packs, by_G, by_K, by_Wo, by_R, by_kernel_w;

  // Computes sample i. Sets `tap` to its index in offset and mask, and `begin` to the pack of x at
  // which the channels of its group begin in pixel 0 of its image.
  __device__ bool sample(I i, Sample<A, I>& s, A& factor, I& tap, I& begin) const {
    const I of_point = by_G.quotient(i), group = i - of_point * by_G.d;
    const I point = by_K.quotient(of_point), k = of_point - point * by_K.d;
    const I line = by_Wo.quotient(point), column = point - line * by_Wo.d;
    const I n = by_R.quotient(line), r = line - n * by_R.d;
    const I row = by_kernel_w.quotient(k);
    const I height = I(g.H), width = I(g.W);
    tap = first_tap<I>(g, n, int64_t(*first_row) + r, column) + group * by_K.d + k;
    begin = (n * height * width * by_G.d + group) * packs;
    const auto moved = load<A, 2>(offset + 2 * int64_t(tap));
    const A y = base_y<A>(g, int64_t(*first_row) + r, row) + moved.at[0];
    const A x = base_x<A>(g, column, k - row * by_kernel_w.d) + moved.at[1];
    factor = g.has_mask ? mask[tap] : A(1);
    return make_sample<A, I>(y, x, height, width, s);
  }
};

// The samples of a block in shared memory.
template <typename A, typename I>
struct SharedSamples {
  Vector<I, 4> begin[kThreads];   // first pack of each corner's channels in x, or -1 outside
  Vector<A, 4> weight[kThreads];  // bilinear weight times mask

  __device__ __forceinline__ void put(int at, const Sample<A, I>& s, A factor, I first,
                                      I packs_of_pixel) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      begin[at].at[q] = s.inside[q] ? first + s.pixel[q] * packs_of_pixel : I(-1);
      weight[at].at[q] = s.inside[q] ? factor * s.weight[q] : A(0);
    }
  }
};

// Loads one pack of each of the four corners, zeros outside of the image. All four loads are issued
// before the first result is used, to hide their latency.
template <typename T, typename A, int V, typename I>
__device__ __forceinline__ void load_corners(const Vector<T, V>* x, const Vector<I, 4>& begin,
                                             I pack, A (&corner)[4][V]) {
  Vector<T, V> stored[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) stored[q] = load_if(begin.at[q] >= 0, x + (begin.at[q] + pack));
#pragma unroll
  for (int q = 0; q < 4; ++q) widen(stored[q], corner[q]);
}

// Forward pass: computes columns [N, R, Wo, K, C], with `block` samples per block of threads.
//
// In the second phase, consecutive threads write consecutive packs of `columns`, and the packs of
// one sample are contiguous in x, so reads and writes are coalesced.
template <typename T, typename A, int V, typename I>
__global__ void __launch_bounds__(kThreads, 5)  // leaves enough registers for four loads in flight
    columns_kernel(Operands<T, A, V, I> in, T* columns, int block) {
  __shared__ SharedSamples<A, I> shared;
  const I first = I(blockIdx.x) * block, count = min(I(block), in.samples - first);
  if (threadIdx.x < count) {
    Sample<A, I> s;
    A factor;
    I tap, begin;
    in.sample(first + I(threadIdx.x), s, factor, tap, begin);
    shared.put(threadIdx.x, s, factor, begin, in.by_G.d * in.packs);
  }
  __syncthreads();
  const auto* const x = reinterpret_cast<const Vector<T, V>*>(in.x);
  auto* const out = reinterpret_cast<Vector<T, V>*>(columns) + int64_t(first) * in.packs;
#pragma unroll 1
  for (I i = threadIdx.x; i < count * in.packs; i += kThreads) {
    const I s = in.by_packs.quotient(i), pack = i - s * in.packs;
    const auto begin = shared.begin[s];
    const auto weight = shared.weight[s];
    A corner[4][V];
    load_corners<T, A, V, I>(x, begin, pack, corner);
    Vector<T, V> sum;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      narrow(weight.at[0] * corner[0][v] + weight.at[1] * corner[1][v] +
                 weight.at[2] * corner[2][v] + weight.at[3] * corner[3][v],
             sum.at[v]);
    }
    out[i] = sum;
  }
}

// Adds the gradient of one pack to dx (unless dx is null), and the products of dcolumns with the
// four corners to `product`.
template <typename T, typename A, int V, typename I>
__device__ __forceinline__ void gradients_of_pack(const Vector<T, V>* x, const Vector<A, 4>& weight,
                                                  const Vector<I, 4>& begin, I pack, Vector<A, V> d,
                                                  A* dx, A product[4]) {
  A corner[4][V];
  load_corners<T, A, V, I>(x, begin, pack, corner);
#pragma unroll
  for (int q = 0; q < 4; ++q) {
#pragma unroll
    for (int v = 0; v < V; ++v) product[q] += d.at[v] * corner[q][v];
  }
  if (!dx) return;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    A more[V];
#pragma unroll
    for (int v = 0; v < V; ++v) more[v] = weight.at[q] * d.at[v];
    if (begin.at[q] >= 0) add<A, V>(dx + int64_t(begin.at[q] + pack) * V, more);
  }
}

// Backward pass: adds to dx atomically, unless dx is null; writes doffset and dmask.
//
// 1 << shift consecutive threads share a sample and stride over its packs. V channels are 16 bytes
// of dx, so that neighboring threads add to neighboring addresses. A shuffle reduction adds up the
// products of a sample over its channels; then the thread that computed the sample's position turns
// them into gradients of offset and mask.
template <typename T, typename A, int V, typename I>
__global__ void __launch_bounds__(kThreads, 2)  // two blocks per SM leave enough registers
    gradients_kernel(Operands<T, A, V, I> in, const A* dcolumns, A* dx, A* doffset, A* dmask,
                     int block, int shift) {
  __shared__ SharedSamples<A, I> shared;
  __shared__ Vector<A, 4> products[kThreads];
  const I first = I(blockIdx.x) * block;
  const int count = static_cast<int>(min(I(block), in.samples - first));
  const bool mine = static_cast<int>(threadIdx.x) < count;
  Sample<A, I> s;
  A factor;
  I tap, begin;
  if (mine) {
    in.sample(first + I(threadIdx.x), s, factor, tap, begin);
    shared.put(threadIdx.x, s, factor, begin, in.by_G.d * in.packs);
  }
  __syncthreads();
  const auto* const x = reinterpret_cast<const Vector<T, V>*>(in.x);
  const int lanes = 1 << shift, lane = threadIdx.x & (lanes - 1);
  for (int turn = 0; turn < count; turn += kThreads >> shift) {
    const int i = turn + (threadIdx.x >> shift);  // all threads stay for the shuffles
    A product[4] = {};
    if (i < count) {
      const auto* const d = reinterpret_cast<const Vector<A, V>*>(dcolumns) +
                            int64_t(first + i) * in.packs;
      const auto from = shared.begin[i];
      const auto weight = shared.weight[i];
#pragma unroll 1
      for (I pack = lane; pack < in.packs; pack += lanes) {
        gradients_of_pack<T, A, V, I>(x, weight, from, pack, d[pack], dx, product);
      }
    }
#pragma unroll
    for (int step = kMostLanes / 2; step > 0; step /= 2) {
      if (step >= lanes) continue;
#pragma unroll
      for (int q = 0; q < 4; ++q) product[q] += __shfl_down_sync(kAllLanes, product[q], step, lanes);
    }
    if (i < count && lane == 0) {
#pragma unroll
      for (int q = 0; q < 4; ++q) products[i].at[q] = product[q];
    }
  }
  __syncthreads();
  if (!mine) return;
  Vector<A, 2> moved;
  A dfactor;
  sample_gradients<A, I>(s, products[threadIdx.x].at, factor, moved.at[0], moved.at[1], dfactor);
  const bool touches = s.inside[0] | s.inside[1] | s.inside[2] | s.inside[3];
  if (!touches) moved.at[0] = moved.at[1] = dfactor = A(0);  // the mask may be NaN or infinite
  reinterpret_cast<Vector<A, 2>*>(doffset)[tap] = moved;
  if (in.g.has_mask) dmask[tap] = dfactor;
}

// Deterministic gradient of x: adds to dx in a fixed order, without atomics.
//
// destination [N, G, corners] holds the pixel of each corner of each sample, sorted, and `source`
// the position of that corner before sorting. `lanes` threads are assigned to each entry. Those at
// the first entry of a pixel add up all entries of that pixel; all other threads return. Entries
// for corners outside of the image have destination >= H * W.
template <typename A, int V>
__global__ void __launch_bounds__(kThreads, 2)
    scatter_kernel(Operands<A, A, V, int64_t> in, const A* dcolumns, const int32_t* destination,
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
  const int64_t group = image_group % g.G, n = image_group / g.G;
  for (int64_t pack = lane; pack < in.packs; pack += lanes) {
    A sum[V] = {};
    for (int64_t e = first; e < corners && destination[e] == pixel; ++e) {
      const int64_t sample = (n * (corners / 4) + source[e] / 4) * g.G + group;
      const int32_t q = source[e] % 4;
      Sample<A> s;
      A factor;
      int64_t tap, begin;
      if (!in.sample(sample, s, factor, tap, begin)) continue;
      const auto d = load<A, V>(dcolumns + (sample * in.packs + pack) * V);
      // Selects without a dynamic index, which would move the sample from registers to local
      // memory.
      const A left = q < 2 ? s.weight[0] : s.weight[2], right = q < 2 ? s.weight[1] : s.weight[3];
      const A weight = factor * (q % 2 ? right : left);
#pragma unroll
      for (int v = 0; v < V; ++v) sum[v] += weight * d.at[v];
    }
    A* out = dx + ((n * g.H * g.W + pixel) * g.G + group) * in.packs * V + pack * V;
#pragma unroll
    for (int v = 0; v < V; ++v) out[v] += sum[v];
  }
}

// Returns true if 32-bit indices suffice for the samples and for the packs of x.
inline bool fits_32_bits(const Geometry& g, int packed) {
  constexpr double kMost = 2147483648.0;  // in double, because the products may overflow 64 bits
  const double points = double(g.N) * double(std::max(g.R, g.Ho)) * double(g.Wo);
  const double pixels = double(g.N) * double(g.H) * double(g.W);
  return points * double(g.K) * double(g.G) < kMost && pixels * double(g.C) / packed < kMost;
}

// Calls run(I()) with the smallest sufficient index type.
template <typename Run>
auto with_index(const Geometry& g, int packed, const Run& run) {
  return fits_32_bits(g, packed) ? run(int32_t()) : run(int64_t());
}

template <typename T, typename A, int V, typename I>
Operands<T, A, V, I> make_operands(const Geometry& g, const void* x, const void* offset,
                                   const void* mask, const int32_t* first_row) {
  const auto by = [](int64_t size) { return Divisor<I>(static_cast<I>(size)); };
  const int64_t packs = g.C / g.G / V;
  return {g,
          static_cast<const T*>(x),
          static_cast<const A*>(offset),
          static_cast<const A*>(mask),
          first_row,
          static_cast<I>(g.N * g.R * g.Wo * g.K * g.G),
          static_cast<I>(packs),
          by(packs), by(g.G), by(g.K), by(g.Wo), by(g.R), by(g.kernel_w)};
}

}  // namespace effjax

#endif  // EFFJAX_DEFORM_CONV_CUDA_H_
