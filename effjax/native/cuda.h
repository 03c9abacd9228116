// What the kernels of all operators share on a GPU: packs of channels, and how threads take them.
//
// Images are NHWC, so the channels of a pixel are next to each other: neighbouring threads take
// neighbouring channels, 16 bytes each where the number of channels allows it. Addresses are 64-bit.
#ifndef EFFJAX_CUDA_H_
#define EFFJAX_CUDA_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "sampling.h"

namespace effjax {

constexpr int kThreads = 256;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ void narrow(float x, float& y) { y = x; }
__device__ __forceinline__ void narrow(double x, double& y) { y = x; }
__device__ __forceinline__ void narrow(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }
__device__ __forceinline__ void narrow(float x, __half& y) { y = __float2half_rn(x); }

template <typename T, int V>
struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Vector {
  T at[V];
};

template <typename T, int V>
__device__ __forceinline__ Vector<T, V> load(const T* p) {
  return *reinterpret_cast<const Vector<T, V>*>(p);
}

// dx[0..V) += value, from many threads. Four floats at a time where the GPU can.
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

// How many threads share a sample: as many as there are packs, a power of two up to a warp.
inline int lanes_for(int64_t packs) {
  int lanes = 1;
  while (lanes < packs && lanes < 32) lanes *= 2;
  return lanes;
}

}  // namespace effjax

#endif  // EFFJAX_CUDA_H_
