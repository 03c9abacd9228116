// The CUDA kernels of deformable convolution compiled for a CPU, for emulation.py.

#include "cuda_runtime.h"

#include "deform_conv_cuda.h"
#include "types.h"

namespace {

using effjax::Geometry;

struct Arrays {
  const void *x, *offset, *mask;
  const int32_t* row;
  const void* dcolumns;
  const int32_t *destination, *source;
  void *columns, *dx, *doffset, *dmask;
};

// Uses 64-bit indices if the sizes or `wide` require them, and otherwise 32-bit indices.
template <typename Run>
void with_index(const Geometry& g, int packed, bool wide, const Run& run) {
  if (wide) {
    run(int64_t());
  } else {
    effjax::with_index(g, packed, run);
  }
}

template <typename T, typename A, int V>
void run_columns(const Geometry& g, const Arrays& a, bool wide) {
  with_index(g, V, wide, [&]<typename I>(I) {
    const auto in = effjax::make_operands<T, A, V, I>(g, a.x, a.offset, a.mask, a.row);
    const int block = effjax::samples_of_block(in.packs, 1);
    launch((in.samples + block - 1) / block, effjax::kThreads, [&] {
      effjax::columns_kernel<T, A, V, I>(in, static_cast<T*>(a.columns), block);
    });
  });
}

template <typename T, typename A, int V>
void run_gradients(const Geometry& g, const Arrays& a, bool wide, bool in_order) {
  const A* dcolumns = static_cast<const A*>(a.dcolumns);
  A* dx = static_cast<A*>(a.dx);
  if (in_order) {
    const auto in = effjax::make_operands<A, A, V, int64_t>(g, nullptr, a.offset, a.mask, a.row);
    const int64_t corners = g.R * g.Wo * g.K * 4, count = g.N * g.G * corners;
    const int lanes = effjax::lanes_for(in.packs);
    launch((count * lanes + effjax::kThreads - 1) / effjax::kThreads, effjax::kThreads, [&] {
      effjax::scatter_kernel<A, V>(in, dcolumns, a.destination, a.source, dx, corners, count, lanes);
    });
    return;
  }
  with_index(g, V, wide, [&]<typename I>(I) {
    const auto in = effjax::make_operands<T, A, V, I>(g, a.x, a.offset, a.mask, a.row);
    const int shift = effjax::shift_for(in.packs);
    const int block = effjax::samples_of_block(in.packs, effjax::kThreads >> shift);
    launch((in.samples + block - 1) / block, effjax::kThreads, [&] {
      effjax::gradients_kernel<T, A, V, I>(in, dcolumns, dx, static_cast<A*>(a.doffset),
                                           static_cast<A*>(a.dmask), block, shift);
    });
  });
}

template <typename T, typename A>
void run(const Geometry& g, const Arrays& a, bool wide, bool in_order) {
  constexpr int kStored = 16 / sizeof(T), kSums = 16 / sizeof(A);
  const int64_t channels = g.C / g.G;
  if (a.columns) {
    channels % kStored == 0 ? run_columns<T, A, kStored>(g, a, wide) : run_columns<T, A, 1>(g, a, wide);
  } else if (channels % kSums == 0) {
    run_gradients<T, A, kSums>(g, a, wide, in_order);
  } else {
    run_gradients<T, A, 1>(g, a, wide, in_order);
  }
}

}  // namespace

// Returns true if 32-bit indices suffice for packs of `packed` channels.
extern "C" bool fits_32_bits(const int64_t* sizes, int packed) {
  Geometry g{};
  g.N = sizes[0], g.H = sizes[1], g.W = sizes[2], g.C = sizes[3], g.R = sizes[4], g.Wo = sizes[5];
  g.K = sizes[6], g.G = sizes[7], g.Ho = sizes[8];
  return effjax::fits_32_bits(g, packed);
}

// Returns how many of the numbers n are divided by d incorrectly.
extern "C" int64_t wrong_quotients(int32_t d, const int32_t* n, int64_t count) {
  const effjax::Divisor<int32_t> by(d);
  int64_t wrong = 0;
  for (int64_t i = 0; i < count; ++i) wrong += by.quotient(n[i]) != n[i] / d;
  return wrong;
}

// Runs the kernel whose result arrays are not null; with `in_order`, the one that computes dx in a
// fixed order. `sizes` are the fields of Geometry in order, and 1 for 64-bit indices.
extern "C" void emulate(const char* dtype, const int64_t* sizes, const Arrays* arrays, bool in_order) {
  const Geometry g{sizes[0],  sizes[1],  sizes[2],  sizes[3],  sizes[4],  sizes[5],
                   sizes[6],  sizes[7],  sizes[8],  sizes[9],  sizes[10], sizes[11],
                   sizes[12], sizes[13], sizes[14], sizes[15], sizes[16] != 0};
  with_types(dtype, [&](auto t, auto a) {
    run<decltype(t), decltype(a)>(g, *arrays, sizes[17] != 0, in_order);
  });
}
