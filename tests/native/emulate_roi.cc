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
auto boxes(const Pooling& g, const Arrays& a) {
  return effjax::make_boxes<T, A, V>(g, a.x, a.first, a.step, a.count);
}

template <typename T, typename A, int V>
void pool(const Pooling& g, const Arrays& a, bool adds) {
  const auto in = boxes<T, A, V>(g, a);
  const int block = effjax::samples_of_block(in.packs, 1);
  launch((in.bins + block - 1) / block, effjax::kThreads, [&] {
    effjax::roi_pool_kernel<T, A, V>(in, static_cast<T*>(a.y), adds, block);
  });
}

template <typename T, typename A, int V>
void gradients(const Pooling& g, const Arrays& a) {
  const auto in = boxes<T, A, V>(g, a);
  const int shift = effjax::shift_for(in.packs);
  const int block = effjax::samples_of_block(in.packs, effjax::kThreads >> shift);
  launch((in.bins + block - 1) / block, effjax::kThreads, [&] {
    effjax::roi_gradients_kernel<T, A, V>(in, static_cast<const T*>(a.dy), static_cast<A*>(a.dx),
                                          static_cast<A*>(a.dfirst), block, shift);
  });
}

template <typename T, typename A, int V>
void gather(const Pooling& g, const Arrays& a) {
  const auto in = boxes<T, A, V>(g, a);
  const auto tiles = effjax::Tiles::of(g, in.packs);
  launch(tiles.blocks(g.N), effjax::kThreads, [&] {
    effjax::roi_gather_kernel<T, A, V>(in, static_cast<const T*>(a.dy), static_cast<A*>(a.dx),
                                       tiles);
  });
}

template <typename T, typename A>
void run(const Pooling& g, const Arrays& a, bool adds, bool gathers) {
  constexpr int kStored = 16 / sizeof(T), kSums = 16 / sizeof(A);
  const int64_t channels = g.C / g.G;
  if (a.y) {
    channels % kStored == 0 ? pool<T, A, kStored>(g, a, adds) : pool<T, A, 1>(g, a, adds);
  } else if (gathers) {
    channels % kStored == 0 ? gather<T, A, kStored>(g, a) : gather<T, A, 1>(g, a);
  } else {
    channels % kSums == 0 ? gradients<T, A, kSums>(g, a) : gradients<T, A, 1>(g, a);
  }
}

}  // namespace

// `sizes` are the fields of Pooling in order. Computes the gradients if y is null; with `gathers`, dx
// in a fixed order.
extern "C" void emulate(const char* dtype, const int64_t* sizes, double margin, bool of_inside,
                        bool adds, bool gathers, const Arrays* arrays) {
  const Pooling g{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],  sizes[5],
                  sizes[6], sizes[7], sizes[8], sizes[9], margin, of_inside};
  if (!std::strcmp(dtype, "float32")) run<float, float>(g, *arrays, adds, gathers);
  if (!std::strcmp(dtype, "float64")) run<double, double>(g, *arrays, adds, gathers);
  if (!std::strcmp(dtype, "bfloat16")) run<__nv_bfloat16, float>(g, *arrays, adds, gathers);
  if (!std::strcmp(dtype, "float16")) run<__half, float>(g, *arrays, adds, gathers);
}
