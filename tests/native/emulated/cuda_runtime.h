// As much of CUDA as the kernels of effjax need, on a CPU: a block's warps run one after the other,
// the 32 threads of a warp as threads of the CPU, which meet in shuffles.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __shared__ static  // warps run one after the other
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __CUDA_ARCH__ EMULATED_ARCH

using std::min;

struct Dim {
  unsigned x = 0;
};
inline thread_local Dim blockIdx, threadIdx;

struct float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline std::mutex memory;
template <typename T>
void atomicAdd(T* address, T value) {
  std::lock_guard<std::mutex> lock(memory);
  *address += value;
}
inline void atomicAdd(float4* address, float4 value) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) std::abort();
  std::lock_guard<std::mutex> lock(memory);
  address->x += value.x, address->y += value.y, address->z += value.z, address->w += value.w;
}

struct Warp {
  std::barrier<> meet{32};
  double values[32];
};
inline thread_local Warp* warp;

template <typename T>
T __shfl_down_sync(unsigned, T value, int step, int width) {
  const int lane = threadIdx.x % 32;
  warp->values[lane] = value;
  warp->meet.arrive_and_wait();
  const bool within = lane % width + step < width;
  const T result = static_cast<T>(warp->values[within ? lane + step : lane]);
  warp->meet.arrive_and_wait();
  return result;
}

inline void __syncwarp() { warp->meet.arrive_and_wait(); }

// kernel() in so many blocks of so many threads.
template <typename Kernel>
void launch(int64_t blocks, int threads, const Kernel& kernel) {
  for (int64_t block = 0; block < blocks; ++block) {
    for (int first = 0; first < threads; first += 32) {
      Warp shared;
      std::vector<std::thread> lanes;
      for (int lane = 0; lane < 32; ++lane) {
        lanes.emplace_back([&, lane] {
          blockIdx.x = static_cast<unsigned>(block);
          threadIdx.x = static_cast<unsigned>(first + lane);
          warp = &shared;
          kernel();
          shared.meet.arrive_and_drop();
        });
      }
      for (auto& lane : lanes) lane.join();
    }
  }
}
