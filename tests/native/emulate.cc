// The CUDA kernels on a CPU, as a library that test_cuda.py calls.

#include "cuda_runtime.h"

#include "deform_conv_cuda.h"

namespace {

using effjax::Geometry;

struct Arrays {
  const void *x, *offset, *mask;
  const int32_t* row;
  const void* dcolumns;
  const int32_t *destination, *source;
  void *columns, *dx, *doffset, *dmask;
};

template <typename T, typename A, int V>
void run(const Geometry& g, const Arrays& a) {
  const effjax::Operands<T, A, V> in{g,
                                     static_cast<const T*>(a.x),
                                     static_cast<const A*>(a.offset),
                                     static_cast<const A*>(a.mask),
                                     a.row,
                                     g.C / g.G / V};
  const A* dcolumns = static_cast<const A*>(a.dcolumns);
  A* dx = static_cast<A*>(a.dx);
  const auto blocks = [](int64_t threads) {
    return (threads + effjax::kThreads - 1) / effjax::kThreads;
  };
  const int lanes = effjax::lanes_for(in.packs);
  if (a.columns) {
    const int64_t count = g.N * g.R * g.Wo * g.K * g.C / V;
    launch(blocks(count), effjax::kThreads,
           [&] { effjax::columns_kernel<T, A, V>(in, static_cast<T*>(a.columns), count); });
  } else if (a.destination) {
    const int64_t corners = g.R * g.Wo * g.K * 4, count = g.N * g.G * corners;
    launch(blocks(count * lanes), effjax::kThreads, [&] {
      const effjax::Operands<A, A, V> sums{in.g, nullptr, in.offset, in.mask, in.first_row, in.packs};
      effjax::scatter_kernel<A, V>(sums, dcolumns, a.destination, a.source, dx, corners, count,
                                   lanes);
    });
  } else {
    const int64_t count = g.N * g.R * g.Wo * g.G * g.K;
    launch(blocks(count * lanes), effjax::kThreads, [&] {
      effjax::gradients_kernel<T, A, V>(in, dcolumns, dx, static_cast<A*>(a.doffset),
                                        static_cast<A*>(a.dmask), count, lanes, dx == nullptr);
    });
  }
}

template <typename T, typename A>
void with_width(const Geometry& g, const Arrays& a) {
  constexpr int kFull = 16 / sizeof(T);
  g.C / g.G % kFull == 0 ? run<T, A, kFull>(g, a) : run<T, A, 1>(g, a);
}

}  // namespace

// The geometry's fields in their order, the arrays in theirs; those that are null say which kernel.
extern "C" void emulate(const char* dtype, const int64_t* sizes, const Arrays* arrays) {
  const Geometry g{sizes[0],  sizes[1],  sizes[2],  sizes[3],  sizes[4],  sizes[5],
                   sizes[6],  sizes[7],  sizes[8],  sizes[9],  sizes[10], sizes[11],
                   sizes[12], sizes[13], sizes[14], sizes[15] != 0};
  if (!std::strcmp(dtype, "float32")) with_width<float, float>(g, *arrays);
  if (!std::strcmp(dtype, "float64")) with_width<double, double>(g, *arrays);
  if (!std::strcmp(dtype, "bfloat16")) with_width<__nv_bfloat16, float>(g, *arrays);
  if (!std::strcmp(dtype, "float16")) with_width<__half, float>(g, *arrays);
}
