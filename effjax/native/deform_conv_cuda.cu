// The custom calls of deformable convolution on a GPU.

#include <limits>

#include "deform_conv_cuda.h"
#include "deform_conv_ffi.h"

namespace effjax {
namespace {

// Runs launch(blocks) for so many threads, and says what went wrong.
template <typename Launch>
ffi::Error launch_threads(int64_t threads, const Launch& launch) {
  if (threads == 0) return ffi::Error::Success();
  const int64_t blocks = (threads + kThreads - 1) / kThreads;
  if (blocks > std::numeric_limits<int32_t>::max()) {
    return invalid("too large for one launch: give a smaller workspace_bytes");
  }
  launch(static_cast<unsigned>(blocks));
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("deformable convolution: ") + cudaGetErrorString(error));
}

ffi::Error copy_if_apart(cudaStream_t stream, ffi::AnyBuffer from, ffi::AnyBuffer to) {
  if (to.untyped_data() == from.untyped_data()) return ffi::Error::Success();
  const cudaError_t error = cudaMemcpyAsync(to.untyped_data(), from.untyped_data(),
                                            to.size_bytes(), cudaMemcpyDeviceToDevice, stream);
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("deformable convolution: ") + cudaGetErrorString(error));
}

template <typename T, typename A, int V>
Operands<T, A, V> operands(const Geometry& g, const void* x, ffi::AnyBuffer offset,
                           ffi::AnyBuffer mask, ffi::Buffer<ffi::S32> row) {
  return {g,
          static_cast<const T*>(x),
          static_cast<const A*>(offset.untyped_data()),
          static_cast<const A*>(mask.untyped_data()),
          row.typed_data(),
          g.C / g.G / V};
}

template <int V>
struct Width {};

// Calls run(T(), A(), Width<V>()): how x is stored, computed in, and how many channels a thread takes.
template <typename Run>
ffi::Error dispatch(ffi::DataType dtype, const Geometry& g, const Run& run) {
  const auto with = [&](auto storage, auto accumulator) {
    constexpr int kFull = 16 / sizeof(storage);
    return g.C / g.G % kFull == 0 ? run(storage, accumulator, Width<kFull>())
                                  : run(storage, accumulator, Width<1>());
  };
  switch (dtype) {
    case ffi::F32: return with(float(), float());
    case ffi::F64: return with(double(), double());
    case ffi::BF16: return with(__nv_bfloat16(), float());
    case ffi::F16: return with(__half(), float());
    default: return invalid("x must be float32, float64, bfloat16 or float16");
  }
}

ffi::Error Columns(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer offset,
                   ffi::AnyBuffer mask, ffi::Buffer<ffi::S32> row,
                   ffi::Result<ffi::AnyBuffer> columns, EFFJAX_GEOMETRY_PARAMETERS) {
  Geometry g;
  if (auto error = check(x, offset, mask, row, *columns, x.element_type(),
                         EFFJAX_GEOMETRY_ARGUMENTS, g);
      error.failure()) {
    return error;
  }
  return dispatch(x.element_type(), g, [&](auto storage, auto accumulator, auto width) {
    using T = decltype(storage);
    using A = decltype(accumulator);
    return [&]<int V>(Width<V>) {
      const auto in = operands<T, A, V>(g, x.untyped_data(), offset, mask, row);
      const int64_t count = g.N * g.R * g.Wo * g.K * g.C / V;
      T* out = static_cast<T*>(columns->untyped_data());
      return launch_threads(count, [&](unsigned blocks) {
        columns_kernel<T, A, V><<<blocks, kThreads, 0, stream>>>(in, out, count);
      });
    }(width);
  });
}

ffi::Error ColumnsBackward(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer offset,
                           ffi::AnyBuffer mask, ffi::Buffer<ffi::S32> row,
                           ffi::AnyBuffer dcolumns, ffi::AnyBuffer dx_so_far,
                           ffi::Result<ffi::AnyBuffer> dx, ffi::Result<ffi::AnyBuffer> doffset,
                           ffi::Result<ffi::AnyBuffer> dmask, EFFJAX_GEOMETRY_PARAMETERS,
                           int64_t skip_dx) {
  Geometry g;
  if (auto error = check(x, offset, mask, row, dcolumns, accumulator_of(x.element_type()),
                         EFFJAX_GEOMETRY_ARGUMENTS, g);
      error.failure()) {
    return error;
  }
  if (auto error = check_gradients(x, offset, mask, dx_so_far, *dx, *doffset, *dmask);
      error.failure()) {
    return error;
  }
  if (auto error = copy_if_apart(stream, dx_so_far, *dx); error.failure()) return error;
  return dispatch(x.element_type(), g, [&](auto storage, auto accumulator, auto width) {
    using T = decltype(storage);
    using A = decltype(accumulator);
    return [&]<int V>(Width<V>) {
      const auto in = operands<T, A, V>(g, x.untyped_data(), offset, mask, row);
      const int64_t count = g.N * g.R * g.Wo * g.G * g.K;
      const int lanes = lanes_for(in.packs);
      return launch_threads(count * lanes, [&](unsigned blocks) {
        gradients_kernel<T, A, V><<<blocks, kThreads, 0, stream>>>(
            in, static_cast<const A*>(dcolumns.untyped_data()),
            static_cast<A*>(dx->untyped_data()), static_cast<A*>(doffset->untyped_data()),
            static_cast<A*>(dmask->untyped_data()), count, lanes, skip_dx != 0);
      });
    }(width);
  });
}

ffi::Error ScatterSorted(cudaStream_t stream, ffi::AnyBuffer offset, ffi::AnyBuffer mask,
                         ffi::Buffer<ffi::S32> row, ffi::AnyBuffer dcolumns,
                         ffi::Buffer<ffi::S32> destination, ffi::Buffer<ffi::S32> source,
                         ffi::AnyBuffer dx_so_far, ffi::Result<ffi::AnyBuffer> dx,
                         EFFJAX_GEOMETRY_PARAMETERS) {
  Geometry g;
  // dx has the shape of x, but not its dtype.
  if (auto error = check_shapes(*dx, offset, mask, row, dcolumns, EFFJAX_GEOMETRY_ARGUMENTS, g);
      error.failure()) {
    return error;
  }
  const int64_t corners = g.R * g.Wo * g.K * 4;
  const auto accumulator = accumulator_of(offset.element_type());
  for (auto sums : {offset, mask, dcolumns, dx_so_far, *dx}) {
    if (sums.element_type() != accumulator) {
      return invalid("offset, mask, dcolumns and dx must all be float32, or all float64");
    }
  }
  if (!has_shape(destination, {g.N, g.G, corners}) || !has_shape(source, {g.N, g.G, corners}) ||
      !has_shape(dx_so_far, {g.N, g.H, g.W, g.C})) {
    return invalid("destination and source must be [N, G, R*Wo*K*4], and dx as x");
  }
  if (auto error = copy_if_apart(stream, dx_so_far, *dx); error.failure()) return error;
  return dispatch(accumulator, g, [&](auto, auto accumulator, auto width) {
    using A = decltype(accumulator);
    return [&]<int V>(Width<V>) {
      const auto in = operands<A, A, V>(g, nullptr, offset, mask, row);
      const int64_t count = g.N * g.G * corners;
      const int lanes = lanes_for(in.packs);
      return launch_threads(count * lanes, [&](unsigned blocks) {
        scatter_kernel<A, V><<<blocks, kThreads, 0, stream>>>(
            in, static_cast<const A*>(dcolumns.untyped_data()), destination.typed_data(),
            source.typed_data(), static_cast<A*>(dx->untyped_data()), corners, count, lanes);
      });
    }(width);
  });
}

}  // namespace
}  // namespace effjax

using effjax::ffi::AnyBuffer;
using effjax::ffi::Ffi;
using Stream = effjax::ffi::PlatformStream<cudaStream_t>;
using Integers = effjax::ffi::Buffer<effjax::ffi::S32>;

// They may be part of a CUDA graph.
XLA_FFI_DEFINE_HANDLER_SYMBOL(EffjaxDeformColumns, effjax::Columns,
                              EFFJAX_BIND_GEOMETRY(Ffi::Bind()
                                                       .Ctx<Stream>()
                                                       .Arg<AnyBuffer>()
                                                       .Arg<AnyBuffer>()
                                                       .Arg<AnyBuffer>()
                                                       .Arg<Integers>()
                                                       .Ret<AnyBuffer>()),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(EffjaxDeformColumnsBackward, effjax::ColumnsBackward,
                              EFFJAX_BIND_GEOMETRY(Ffi::Bind()
                                                       .Ctx<Stream>()
                                                       .Arg<AnyBuffer>()
                                                       .Arg<AnyBuffer>()
                                                       .Arg<AnyBuffer>()
                                                       .Arg<Integers>()
                                                       .Arg<AnyBuffer>()
                                                       .Arg<AnyBuffer>()
                                                       .Ret<AnyBuffer>()
                                                       .Ret<AnyBuffer>()
                                                       .Ret<AnyBuffer>())
                                  .Attr<int64_t>("skip_dx"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(EffjaxDeformScatterSorted, effjax::ScatterSorted,
                              EFFJAX_BIND_GEOMETRY(Ffi::Bind()
                                                       .Ctx<Stream>()
                                                       .Arg<AnyBuffer>()
                                                       .Arg<AnyBuffer>()
                                                       .Arg<Integers>()
                                                       .Arg<AnyBuffer>()
                                                       .Arg<Integers>()
                                                       .Arg<Integers>()
                                                       .Arg<AnyBuffer>()
                                                       .Ret<AnyBuffer>()),
                              {xla::ffi::Traits::kCmdBufferCompatible});

EFFJAX_EXPORT_FFI_API_VERSION
