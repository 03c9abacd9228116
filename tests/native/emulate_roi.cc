// The CUDA kernels of RoI pooling compiled for a CPU, for emulation.py.

#include "cuda_runtime.h"

#include "roi_cuda.h"
#include "types.h"

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
void run(const Pooling& g, const Arrays& a, bool adds, bool in_order) {
  constexpr int kStored = 16 / sizeof(T), kSums = 16 / sizeof(A);
  const int64_t channels = g.C / g.G;
  if (a.y) {
    channels % kStored == 0 ? pool<T, A, kStored>(g, a, adds) : pool<T, A, 1>(g, a, adds);
  } else if (in_order) {
    channels % kStored == 0 ? gather<T, A, kStored>(g, a) : gather<T, A, 1>(g, a);
  } else {
    channels % kSums == 0 ? gradients<T, A, kSums>(g, a) : gradients<T, A, 1>(g, a);
  }
}

}  // namespace

// Runs the kernel whose result arrays are not null; with `in_order`, the one that computes dx in a
// fixed order. `sizes` are the fields of Pooling in order, with twice the margin, and 1 to add to y.
extern "C" void emulate(const char* dtype, const int64_t* sizes, const Arrays* arrays, bool in_order) {
  const Pooling g{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],      sizes[5],
                  sizes[6], sizes[7], sizes[8], sizes[9], sizes[10] / 2.0, sizes[11] != 0};
  with_types(dtype, [&](auto t, auto a) {
    run<decltype(t), decltype(a)>(g, *arrays, sizes[12] != 0, in_order);
  });
}
