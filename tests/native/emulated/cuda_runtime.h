// The part of CUDA that the kernels of effjax use, emulated on a CPU. The threads of a block are CPU
// threads, synchronized in shuffles and barriers. Blocks run one after the other.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __shared__ static  // blocks run one after the other
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __CUDA_ARCH__ EMULATED_ARCH

using std::fabs;
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

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const int lane = threadIdx.x % 32;
  warp->values[lane] = value;
  warp->meet.arrive_and_wait();
  const T result = static_cast<T>(warp->values[lane ^ mask]);
  warp->meet.arrive_and_wait();
  return result;
}

inline unsigned __ballot_sync(unsigned, bool value) {
  warp->values[threadIdx.x % 32] = value;
  warp->meet.arrive_and_wait();
  unsigned result = 0;
  for (int lane = 0; lane < 32; ++lane) result |= unsigned{warp->values[lane] != 0} << lane;
  warp->meet.arrive_and_wait();
  return result;
}

inline int __popc(unsigned bits) { return std::popcount(bits); }

inline void __syncwarp() { warp->meet.arrive_and_wait(); }

struct Block {
  explicit Block(int threads) : meet(threads), warps(threads / 32) {}
  std::barrier<> meet;
  std::vector<Warp> warps;
};
inline thread_local Block* block_of_threads;
inline void __syncthreads() { block_of_threads->meet.arrive_and_wait(); }

inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint32_t((uint64_t{a} * b) >> 32); }
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Seed of a permutation of the blocks, and of the order in which their threads start; 0 for the order
// of their numbers. A result that depends on the order of atomic additions changes with it.
inline uint64_t order_seed = 0;
extern "C" inline __attribute__((used)) void set_order(uint64_t seed) { order_seed = seed; }

inline std::vector<int64_t> ordered(int64_t count, uint64_t seed) {
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), int64_t{0});
  if (seed) std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
  return order;
}

// Runs a kernel with the given numbers of blocks and of threads per block.
template <typename Kernel>
void launch(int64_t blocks, int threads, const Kernel& kernel) {
  for (int64_t index : ordered(blocks, order_seed)) {
    Block block(threads);
    std::vector<std::thread> all;
    for (int64_t thread : ordered(threads, order_seed ? order_seed + index + 1 : 0)) {
      all.emplace_back([&, thread] {
        blockIdx.x = static_cast<unsigned>(index);
        threadIdx.x = static_cast<unsigned>(thread);
        block_of_threads = &block;
        warp = &block.warps[thread / 32];
        kernel();
        warp->meet.arrive_and_drop();
        block.meet.arrive_and_drop();
      });
    }
    for (auto& thread : all) thread.join();
  }
}
