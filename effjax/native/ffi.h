// Code shared by all XLA FFI handlers: shape checks, dtype dispatch and exported symbols.
#ifndef EFFJAX_FFI_H_
#define EFFJAX_FFI_H_

#include <algorithm>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <new>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace effjax {

namespace ffi = xla::ffi;
using AnyBuffer = ffi::AnyBuffer;
using Integers = ffi::Buffer<ffi::S32>;
using Result = ffi::Result<AnyBuffer>;

inline ffi::Error invalid(const std::string& what) {
  return ffi::Error::InvalidArgument("effjax's kernels: " + what);
}

// Returns the shape as text, for error messages.
inline std::string shape_text(AnyBuffer buffer) {
  std::string text = "[";
  for (int64_t size : buffer.dimensions()) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  }
  return text + "]";
}

template <typename Buffer>
inline bool has_shape(const Buffer& buffer, std::initializer_list<int64_t> shape) {
  const auto sizes = buffer.dimensions();
  return sizes.size() == shape.size() && std::equal(shape.begin(), shape.end(), sizes.begin());
}

// Returns the product of sizes, or -1 if it overflows. No array has size -1, so checks then fail.
inline int64_t product_of(std::initializer_list<int64_t> sizes) {
  int64_t product = 1;
  for (int64_t size : sizes) {
    if (size < 0 || __builtin_mul_overflow(product, size, &product)) return -1;
  }
  return product;
}

// Returns true if the number of elements, with zero sizes counted as one, is far below the limit of
// 64 bits. Sums and products of a few sizes derived from such an array do not overflow.
inline bool is_countable(AnyBuffer buffer) {
  int64_t product = 1;
  for (int64_t size : buffer.dimensions()) product = product_of({product, std::max<int64_t>(size, 1)});
  return product >= 0 && product < (int64_t{1} << 56);
}

// Upper limit of sizes passed as attributes, for the same reason.
constexpr int64_t kMostOfAttributes = int64_t{1} << 30;

// Returns the dtype of coordinates and sums: float64 for float64, else float32.
inline ffi::DataType accumulator_of(ffi::DataType storage) {
  return storage == ffi::F64 ? ffi::F64 : ffi::F32;
}

// Calls run(T(), A()) with the storage type and the type of the computation.
template <typename BFloat16, typename Float16, typename Run>
ffi::Error with_types(ffi::DataType dtype, const Run& run) {
  switch (dtype) {
    case ffi::F32: return run(float(), float());
    case ffi::F64: return run(double(), double());
    case ffi::BF16: return run(BFloat16(), float());
    case ffi::F16: return run(Float16(), float());
    default: return invalid("x must be float32, float64, bfloat16 or float16");
  }
}

inline bool same_shape(AnyBuffer a, AnyBuffer b) {
  const auto left = a.dimensions(), right = b.dimensions();
  return left.size() == right.size() && std::equal(left.begin(), left.end(), right.begin());
}

// Copies `from` to `to`, unless XLA gave both the same buffer.
template <typename Device>
ffi::Error copy_if_apart(typename Device::Context context, AnyBuffer from, AnyBuffer to) {
  if (to.untyped_data() == from.untyped_data() || to.size_bytes() == 0) return ffi::Error::Success();
  return Device::copy(context, from.untyped_data(), to.untyped_data(), to.size_bytes());
}

// Runs call() and converts exceptions to errors, because none may pass through XLA's C interface.
template <typename Call>
XLA_FFI_Error* without_exceptions(const XLA_FFI_Api* api, const Call& call) {
  XLA_FFI_Error_Create_Args error{};
  error.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  error.errc = XLA_FFI_Error_Code_INTERNAL;
  try {
    return call();
  } catch (const std::bad_alloc&) {
    error.errc = XLA_FFI_Error_Code_RESOURCE_EXHAUSTED;
    error.message = "effjax's kernels: out of host memory";
    return api->XLA_FFI_Error_Create(&error);
  } catch (const std::exception& exception) {
    error.message = exception.what();
    return api->XLA_FFI_Error_Create(&error);
  } catch (...) {
    error.message = "effjax's kernels: unknown exception";
    return api->XLA_FFI_Error_Create(&error);
  }
}

}  // namespace effjax

// Exports a handler under the name `symbol`. Further arguments are the handler's traits.
#define EFFJAX_EXPORT(symbol, call, ...)                                             \
  extern "C" XLA_FFI_Error* symbol(XLA_FFI_CallFrame* frame) {                       \
    return effjax::without_exceptions(frame->api, [frame] {                          \
      static auto* handler = xla::ffi::Ffi::BindTo(call, {__VA_ARGS__}).release();   \
      return handler->Call(frame);                                                   \
    });                                                                              \
  }

#endif  // EFFJAX_FFI_H_
