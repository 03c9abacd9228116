// The CUDA kernels of deformable attention compiled for a CPU, for test_cuda_attention.py.

#include "cuda_runtime.h"

#include "deform_attention_cuda.h"

namespace {

using effjax::Attention;

struct Arrays {
  const void *value, *locations, *weights, *dy;
  void *y, *dvalue, *dlocations, *dweights;
};

template <typename T, typename A, int V>
void run(const Attention& g, const Arrays& a) {
  const auto in = effjax::attention_arrays<T, A, V>(g, a.value, a.locations, a.weights);
  const int64_t threads = int64_t{in.heads} << in.shift;
  const int64_t blocks = (threads + effjax::kThreads - 1) / effjax::kThreads;
  launch(blocks, effjax::kThreads, [&] {
    if (a.y) {
      effjax::attend_kernel<T, A, V>(in, static_cast<T*>(a.y));
    } else {
      effjax::attend_backward_kernel<T, A, V>(
          in, static_cast<const T*>(a.dy), static_cast<A*>(a.dvalue),
          static_cast<A*>(a.dlocations), static_cast<A*>(a.dweights));
    }
  });
}

template <typename T, typename A>
void with_width(const Attention& g, const Arrays& a) {
  constexpr int kFull = 16 / sizeof(T);
  g.D % kFull == 0 ? run<T, A, kFull>(g, a) : run<T, A, 1>(g, a);
}

}  // namespace

// sizes are N, S, M, D, Q, P, `normalized`, and (H, W) of each level.
extern "C" void emulate(const char* dtype, const int64_t* sizes, int64_t levels,
                        const Arrays* arrays) {
  Attention g{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], {}, sizes[6] != 0};
  for (int64_t l = 0; l < levels; ++l) g.levels.push_back({sizes[7 + 2 * l], sizes[8 + 2 * l]});
  if (!std::strcmp(dtype, "float32")) with_width<float, float>(g, *arrays);
  if (!std::strcmp(dtype, "float64")) with_width<double, double>(g, *arrays);
  if (!std::strcmp(dtype, "bfloat16")) with_width<__nv_bfloat16, float>(g, *arrays);
  if (!std::strcmp(dtype, "float16")) with_width<__half, float>(g, *arrays);
}
