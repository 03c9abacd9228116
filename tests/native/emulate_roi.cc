// The CUDA kernels of RoI pooling compiled for a CPU, as a library for test_cuda_roi.py.

#include "cuda_runtime.h"

#include "roi_cuda.h"

namespace {

using effjax::Pooling;

struct Arrays {
  const void *x, *first, *step, *count, *dy;
  void *y, *dx, *dfirst;
};

template <typename T, typename A, int V>
void run(const Pooling& g, const Arrays& a, bool adds) {
  const effjax::Boxes<T, A> in{g, static_cast<const T*>(a.x), static_cast<const A*>(a.first),
                               static_cast<const A*>(a.step), static_cast<const A*>(a.count)};
  const auto blocks = [](int64_t threads) {
    return (threads + effjax::kThreads - 1) / effjax::kThreads;
  };
  const int64_t packs = g.C / g.G / V, bins = g.N * g.R * g.P * g.G;
  const int lanes = effjax::lanes_for(packs);
  if (a.y) {
    launch(blocks(bins * packs), effjax::kThreads, [&] {
      effjax::roi_pool_kernel<T, A, V>(in, static_cast<T*>(a.y), adds, packs, bins * packs);
    });
  } else {
    launch(blocks(bins * lanes), effjax::kThreads, [&] {
      effjax::roi_gradients_kernel<T, A, V>(in, static_cast<const T*>(a.dy), static_cast<A*>(a.dx),
                                            static_cast<A*>(a.dfirst), packs, bins, lanes);
    });
  }
}

template <typename T, typename A>
void with_width(const Pooling& g, const Arrays& a, bool adds) {
  constexpr int kFull = 16 / sizeof(T);
  g.C / g.G % kFull == 0 ? run<T, A, kFull>(g, a, adds) : run<T, A, 1>(g, a, adds);
}

}  // namespace

// `sizes` are the fields of Pooling in order. Computes the gradients if y is null.
extern "C" void emulate(const char* dtype, const int64_t* sizes, double margin, bool of_inside,
                        bool adds, const Arrays* arrays) {
  const Pooling g{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],  sizes[5],
                  sizes[6], sizes[7], sizes[8], sizes[9], margin, of_inside};
  if (!std::strcmp(dtype, "float32")) with_width<float, float>(g, *arrays, adds);
  if (!std::strcmp(dtype, "float64")) with_width<double, double>(g, *arrays, adds);
  if (!std::strcmp(dtype, "bfloat16")) with_width<__nv_bfloat16, float>(g, *arrays, adds);
  if (!std::strcmp(dtype, "float16")) with_width<__half, float>(g, *arrays, adds);
}
