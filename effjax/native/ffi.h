// Shared code of all custom calls: checks of their inputs, and their symbols.
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

// The product of sizes, or -1, which is the size of nothing, where 64 bits do not hold it.
inline int64_t product_of(std::initializer_list<int64_t> sizes) {
  int64_t product = 1;
  for (int64_t size : sizes) {
    if (size < 0 || __builtin_mul_overflow(product, size, &product)) return -1;
  }
  return product;
}

// True if all sizes derived from those of an array, and they themselves if others are zero, are far
// below the limit of 64 bits: then no sum or product of them overflows.
inline bool is_countable(AnyBuffer buffer) {
  int64_t product = 1;
  for (int64_t size : buffer.dimensions()) product = product_of({product, std::max<int64_t>(size, 1)});
  return product >= 0 && product < (int64_t{1} << 56);
}

// The same for numbers that come as attributes.
constexpr int64_t kMostOfAttributes = int64_t{1} << 30;

// The dtype that coordinates and sums have: float64 for float64, else float32.
inline ffi::DataType accumulator_of(ffi::DataType storage) {
  return storage == ffi::F64 ? ffi::F64 : ffi::F32;
}

// Calls run(T(), A()) with the types that x is stored in and computed in.
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

// Lets `to` begin as `from` where XLA could not reuse the buffer.
template <typename Device>
ffi::Error copy_if_apart(typename Device::Context context, AnyBuffer from, AnyBuffer to) {
  if (to.untyped_data() == from.untyped_data() || to.size_bytes() == 0) return ffi::Error::Success();
  return Device::copy(context, from.untyped_data(), to.untyped_data(), to.size_bytes());
}

// Runs call(). Exceptions become errors: none may pass through XLA's C interface.
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

// A call as a symbol of the library; further arguments are its traits.
#define EFFJAX_EXPORT(symbol, call, ...)                                             \
  extern "C" XLA_FFI_Error* symbol(XLA_FFI_CallFrame* frame) {                       \
    return effjax::without_exceptions(frame->api, [frame] {                          \
      static auto* handler = xla::ffi::Ffi::BindTo(call, {__VA_ARGS__}).release();   \
      return handler->Call(frame);                                                   \
    });                                                                              \
  }

#endif  // EFFJAX_FFI_H_
