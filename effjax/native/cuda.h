// Helpers shared by the CUDA kernels: type conversion, vector loads, fast division, atomic adds.
//
// Arrays are channels-last, so the channels of a pixel are contiguous. Each thread handles one
// "pack" of V channels, and neighboring threads handle neighboring packs, which makes accesses
// coalesced. A pack is 16 bytes if the number of channels allows it, and otherwise one channel.
// Pointer offsets are computed in 64 bits.
#ifndef EFFJAX_CUDA_H_
#define EFFJAX_CUDA_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>

#include "sampling.h"

namespace effjax {

constexpr int kThreads = 256;
constexpr unsigned kAllLanes = 0xffffffffu;
// Maximum number of threads that share a sample in a backward pass: 128 contiguous bytes of dx.
constexpr int kMostLanes = 8;

// Conversion between the storage type and the type of the computation (float or double).
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ void narrow(float x, float& y) { y = x; }
__device__ __forceinline__ void narrow(double x, double& y) { y = x; }
__device__ __forceinline__ void narrow(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }
__device__ __forceinline__ void narrow(float x, __half& y) { y = __float2half_rn(x); }

// V consecutive numbers, aligned so that one instruction loads up to 16 bytes.
template <typename T, int V>
struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Vector {
  T at[V];
};

template <typename T, int V>
__device__ __forceinline__ Vector<T, V> load(const T* p) {
  return *reinterpret_cast<const Vector<T, V>*>(p);
}

// Returns *from if `there` is true, and zeros otherwise.
//
// The zeros are written as 32-bit words. Zeroing 16-bit members one by one takes an instruction
// each.
template <typename T, int V>
__device__ __forceinline__ Vector<T, V> load_if(bool there, const Vector<T, V>* from) {
  constexpr int kSize = sizeof(Vector<T, V>);
  if constexpr (kSize % 4 == 0) {
    using Words = Vector<uint32_t, kSize / 4>;
    Words words{};
    if (there) words = *reinterpret_cast<const Words*>(from);
    Vector<T, V> result;
    memcpy(&result, &words, kSize);
    return result;
  } else {
    Vector<T, V> result{};
    if (there) result = *from;
    return result;
  }
}

// Returns the pointer `index` strides of `bytes` each behind `from`. Unsigned 32-bit factors make
// this one instruction.
template <typename T>
__device__ __forceinline__ const T* advance(const T* from, uint32_t index, uint32_t bytes) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(from) + uint64_t{index} * bytes);
}
template <typename T>
__device__ __forceinline__ T* advance(T* from, uint32_t index, uint32_t bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<char*>(from) + uint64_t{index} * bytes);
}

// Converts a pack to the type of the computation.
template <typename T, int V, typename A>
__device__ __forceinline__ void widen(const Vector<T, V>& from, A (&to)[V]) {
#pragma unroll
  for (int v = 0; v < V; ++v) to[v] = widen(from.at[v]);
}
// Converts a pack of bfloat16. A bfloat16 is the upper half of a float, so a 32-bit register with
// two of them takes one shift and one mask.
template <int V>
__device__ __forceinline__ void widen(const Vector<__nv_bfloat16, V>& from, float (&to)[V]) {
  if constexpr (V % 2 == 0) {
    uint32_t words[V / 2];
    memcpy(words, &from, sizeof words);
#pragma unroll
    for (int v = 0; v < V; v += 2) {
      to[v] = __uint_as_float(words[v / 2] << 16);
      to[v + 1] = __uint_as_float(words[v / 2] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int v = 0; v < V; ++v) to[v] = widen(from.at[v]);
  }
}

// Division by a divisor that is the same for all threads. The 64-bit version divides in hardware.
template <typename I>
struct Divisor {
  I d;
  explicit Divisor(I divisor) : d(divisor) {}
  __device__ __forceinline__ I quotient(I n) const { return n / d; }
};

// The 32-bit version multiplies by the reciprocal of the divisor, rounded up to a multiple of
// 2^-(32 + shift), where 2^shift is the next power of two. The quotient is exact for every
// 0 <= n < 2^31 (Granlund and Montgomery, "Division by Invariant Integers using Multiplication",
// 1994). This avoids an integer division, which takes tens of instructions.
template <>
struct Divisor<int32_t> {
  int32_t d;
  uint32_t factor, shift;  // ceil(2^(32 + shift) / d) - 2^32

  explicit Divisor(int32_t divisor) : d(divisor), factor(0), shift(0) {
    if (d < 1) return;
    while ((uint64_t{1} << shift) < uint64_t(d)) ++shift;
    factor = uint32_t((((uint64_t{1} << shift) - uint64_t(d)) << 32) / uint64_t(d) + 1);
  }
  __device__ __forceinline__ int32_t quotient(int32_t n) const {
    return int32_t((__umulhi(uint32_t(n), factor) + uint32_t(n)) >> shift);
  }
};

// Adds V values to dx[0..V) atomically. From compute capability 9.0 on, one instruction adds four
// floats.
template <typename A, int V>
__device__ __forceinline__ void add(A* dx, const A (&value)[V]) {
#if __CUDA_ARCH__ >= 900
  constexpr bool kFour = sizeof(A) == 4 && V % 4 == 0;
#else
  constexpr bool kFour = false;
#endif
  if constexpr (kFour) {
#if __CUDA_ARCH__ >= 900
#pragma unroll
    for (int v = 0; v < V; v += 4) {
      atomicAdd(reinterpret_cast<float4*>(dx + v),
                make_float4(value[v], value[v + 1], value[v + 2], value[v + 3]));
    }
#endif
  } else {
#pragma unroll
    for (int v = 0; v < V; ++v) atomicAdd(dx + v, value[v]);
  }
}

// Adds up four values over a group of `lanes` consecutive threads, at least four. The first four
// threads of the group get one of the sums each; `q` is set to its number. All threads of the warp
// must take part. The first two steps each halve the number of values of a thread, so that there are
// four shuffles for eight lanes and not twelve.
template <typename A>
__device__ __forceinline__ A sum_of_group(const A (&value)[4], int lanes, int& q) {
  const int lane = static_cast<int>(threadIdx.x);
  const bool odd = lane & 1, second = lane & 2;
  A low = odd ? value[2] : value[0], high = odd ? value[3] : value[1];
  low += __shfl_xor_sync(kAllLanes, odd ? value[0] : value[2], 1);
  high += __shfl_xor_sync(kAllLanes, odd ? value[1] : value[3], 1);
  A sum = second ? high : low;
  sum += __shfl_xor_sync(kAllLanes, second ? low : high, 2);
#pragma unroll
  for (int step = 4; step < 32; step *= 2) {
    if (step < lanes) sum += __shfl_xor_sync(kAllLanes, sum, step);
  }
  q = 2 * odd + second;
  return sum;
}

// Returns the number of threads that share a sample: the number of packs, rounded up to a power of
// two, at most one warp.
inline int lanes_for(int64_t packs) {
  int lanes = 1;
  while (lanes < packs && lanes < 32) lanes *= 2;
  return lanes;
}

// Returns the number of samples per block: enough packs to amortize the computation of the
// positions, and at least `least`.
inline int samples_of_block(int64_t packs, int least) {
  constexpr int64_t kPacks = 2048;
  return static_cast<int>(std::clamp<int64_t>(kPacks / std::max<int64_t>(packs, 1), least, kThreads));
}

// Returns log2 of the number of threads that share a sample in the backward pass.
inline int shift_for(int64_t packs) {
  int shift = 0;
  while ((1 << shift) < kMostLanes && (1 << shift) < packs) ++shift;
  return shift;
}

}  // namespace effjax

#endif  // EFFJAX_CUDA_H_
