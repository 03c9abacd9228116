// The CUDA kernels of deformable attention compiled for a CPU, for emulation.py.

#include "cuda_runtime.h"

#include "deform_attention_cuda.h"
#include "types.h"

namespace {

using effjax::Attention;

struct Arrays {
  const void *value, *locations, *weights, *dy;
  const int32_t *destination, *source;
  void *y, *dvalue, *dlocations, *dweights;
};

template <typename T, typename A, int V>
auto arrays(const Attention& g, const Arrays& a, int least_lanes = 1) {
  return effjax::attention_arrays<T, A, V>(g, a.value, a.locations, a.weights, least_lanes);
}

template <typename Kernel>
void launch_threads(int64_t threads, const Kernel& kernel) {
  launch((threads + effjax::kThreads - 1) / effjax::kThreads, effjax::kThreads, kernel);
}

template <typename T, typename A, int V>
void attend(const Attention& g, const Arrays& a) {
  const auto in = arrays<T, A, V>(g, a);
  launch_threads(int64_t{in.heads} << in.shift, [&] {
    effjax::attend_kernel<T, A, V>(in, static_cast<T*>(a.y));
  });
}

template <typename T, typename A, int V>
void scatter(const Attention& g, const Arrays& a) {
  const auto in = arrays<T, A, V>(g, a);
  const auto corners = static_cast<int32_t>(g.Q * g.points() * 4);
  const auto of_head = static_cast<int32_t>(effjax::scatter_blocks(corners, in.shift));
  launch(g.N * g.M * of_head, effjax::kThreads, [&] {
    effjax::attend_scatter_kernel<T, A, V>(
        in, static_cast<const T*>(a.dy), a.destination, a.source, static_cast<A*>(a.dvalue),
        static_cast<int32_t>(g.S), corners, effjax::Divisor<int32_t>(of_head));
  });
}

template <typename T, typename A, int V>
void attend_backward(const Attention& g, const Arrays& a) {
  const auto in = arrays<T, A, V>(g, a, effjax::kLeastLanes);
  launch_threads(int64_t{in.heads} << in.shift, [&] {
    effjax::attend_backward_kernel<T, A, V>(
        in, static_cast<const T*>(a.dy), static_cast<A*>(a.dvalue), static_cast<A*>(a.dlocations),
        static_cast<A*>(a.dweights));
  });
}

template <typename T, typename A>
void run(const Attention& g, const Arrays& a, bool in_order) {
  constexpr int kStored = 16 / sizeof(T), kSums = 16 / sizeof(A);
  if (a.y) {
    g.D % kStored == 0 ? attend<T, A, kStored>(g, a) : attend<T, A, 1>(g, a);
  } else if (in_order) {
    g.D % kStored == 0 ? scatter<T, A, kStored>(g, a) : scatter<T, A, 1>(g, a);
  } else {
    g.D % kSums == 0 ? attend_backward<T, A, kSums>(g, a) : attend_backward<T, A, 1>(g, a);
  }
}

}  // namespace

// Runs the kernel whose result arrays are not null; with `in_order`, the one that computes dvalue in a
// fixed order. `sizes` are N, S, M, D, Q, P, `normalized`, the number of levels, and their (H, W).
extern "C" void emulate(const char* dtype, const int64_t* sizes, const Arrays* arrays, bool in_order) {
  Attention g{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], {}, sizes[6] != 0};
  for (int64_t l = 0; l < sizes[7]; ++l) g.levels.push_back({sizes[8 + 2 * l], sizes[9 + 2 * l]});
  with_types(dtype, [&](auto t, auto a) { run<decltype(t), decltype(a)>(g, *arrays, in_order); });
}
