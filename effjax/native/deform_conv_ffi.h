// What the CPU and the CUDA handlers share: their attributes, and the checks of what they are given.
// Python has checked before; this is for whoever calls the custom call directly.
#ifndef EFFJAX_DEFORM_CONV_FFI_H_
#define EFFJAX_DEFORM_CONV_FFI_H_

#include <algorithm>
#include <initializer_list>
#include <string>

#include "deform_conv.h"
#include "xla/ffi/api/ffi.h"

#define EFFJAX_GEOMETRY_PARAMETERS                                                           \
  int64_t kernel_h, int64_t kernel_w, int64_t stride_h, int64_t stride_w, int64_t padding_top, \
      int64_t padding_left, int64_t dilation_h, int64_t dilation_w, int64_t offset_groups
#define EFFJAX_GEOMETRY_ARGUMENTS                                                   \
  kernel_h, kernel_w, stride_h, stride_w, padding_top, padding_left, dilation_h, dilation_w, \
      offset_groups
#define EFFJAX_BIND_GEOMETRY(binding)    \
  (binding)                              \
      .template Attr<int64_t>("kernel_h")         \
      .template Attr<int64_t>("kernel_w")         \
      .template Attr<int64_t>("stride_h")         \
      .template Attr<int64_t>("stride_w")         \
      .template Attr<int64_t>("padding_top")      \
      .template Attr<int64_t>("padding_left")     \
      .template Attr<int64_t>("dilation_h")       \
      .template Attr<int64_t>("dilation_w")       \
      .template Attr<int64_t>("offset_groups")

namespace effjax {

namespace ffi = xla::ffi;

inline ffi::Error invalid(const std::string& what) {
  return ffi::Error::InvalidArgument("deformable convolution: " + what);
}

inline std::string shape_text(ffi::AnyBuffer buffer) {
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

// The dtype that coordinates and sums have: float64 for float64, else float32.
inline ffi::DataType accumulator_of(ffi::DataType storage) {
  return storage == ffi::F64 ? ffi::F64 : ffi::F32;
}

// Checks ranks and shapes; fills in the geometry.
inline ffi::Error check_shapes(ffi::AnyBuffer x, ffi::AnyBuffer offset, ffi::AnyBuffer mask,
                               ffi::Buffer<ffi::S32> row, ffi::AnyBuffer columns,
                               EFFJAX_GEOMETRY_PARAMETERS, Geometry& g) {
  if (std::min({kernel_h, kernel_w, stride_h, stride_w, dilation_h, dilation_w, offset_groups}) < 1) {
    return invalid("the kernel's size, strides, dilations and offset_groups must be positive");
  }
  if (x.dimensions().size() != 4 || offset.dimensions().size() != 4 || row.element_count() != 1) {
    return invalid("x must be [N, H, W, C], not " + shape_text(x) + ", offset [N, R, Wo, G*K*2], not " +
                   shape_text(offset) + ", and row one number");
  }
  const auto sizes = x.dimensions(), rows = offset.dimensions();
  g = Geometry{sizes[0], sizes[1], sizes[2], sizes[3], rows[1], rows[2], kernel_h * kernel_w,
               offset_groups, kernel_w, stride_h, stride_w, padding_top, padding_left, dilation_h,
               dilation_w, true};
  const int64_t taps = g.G * g.K;
  if (!has_shape(offset, {g.N, g.R, g.Wo, 2 * taps}) || g.C % g.G != 0) {
    return invalid("offset of shape " + shape_text(offset) + " does not fit x of shape " +
                   shape_text(x) + " with " + std::to_string(g.K) + " taps and " +
                   std::to_string(g.G) + " offset groups");
  }
  g.has_mask = !has_shape(mask, {g.N, g.R, g.Wo, 0});
  if (g.has_mask && !has_shape(mask, {g.N, g.R, g.Wo, taps})) {
    return invalid("mask of shape " + shape_text(mask) + " does not fit offset of shape " +
                   shape_text(offset));
  }
  if (!has_shape(columns, {g.N, g.R, g.Wo, g.K * g.C})) {
    return invalid("columns of shape " + shape_text(columns) + " do not fit x of shape " +
                   shape_text(x));
  }
  return ffi::Error::Success();
}

// Checks dtypes too.
inline ffi::Error check(ffi::AnyBuffer x, ffi::AnyBuffer offset, ffi::AnyBuffer mask,
                        ffi::Buffer<ffi::S32> row, ffi::AnyBuffer columns,
                        ffi::DataType columns_dtype, EFFJAX_GEOMETRY_PARAMETERS, Geometry& g) {
  if (auto error = check_shapes(x, offset, mask, row, columns, EFFJAX_GEOMETRY_ARGUMENTS, g);
      error.failure()) {
    return error;
  }
  if (columns.element_type() != columns_dtype) {
    return invalid("columns must have x's dtype, and their gradient that of offset");
  }
  const auto accumulator = accumulator_of(x.element_type());
  if (offset.element_type() != accumulator || mask.element_type() != accumulator) {
    return invalid("offset and mask must be float32, or float64 where x is");
  }
  return ffi::Error::Success();
}

inline ffi::Error check_gradients(ffi::AnyBuffer x, ffi::AnyBuffer offset, ffi::AnyBuffer mask,
                                  ffi::AnyBuffer dx_so_far, ffi::AnyBuffer dx,
                                  ffi::AnyBuffer doffset, ffi::AnyBuffer dmask) {
  const auto same = [](ffi::AnyBuffer a, ffi::AnyBuffer b) {
    const auto left = a.dimensions(), right = b.dimensions();
    return left.size() == right.size() && std::equal(left.begin(), left.end(), right.begin());
  };
  const auto accumulator = accumulator_of(x.element_type());
  for (auto gradient : {dx_so_far, dx, doffset, dmask}) {
    if (gradient.element_type() != accumulator) {
      return invalid("gradients must be float32, or float64 where x is");
    }
  }
  if (!same(dx_so_far, x) || !same(dx, x) || !same(doffset, offset) || !same(dmask, mask)) {
    return invalid("gradients must have the shapes of x, offset and mask");
  }
  return ffi::Error::Success();
}

}  // namespace effjax

// The version of XLA's FFI that a library speaks, for the loader to compare.
#define EFFJAX_EXPORT_FFI_API_VERSION                                             \
  extern "C" void effjax_ffi_api_version(int32_t* major, int32_t* minor) {        \
    *major = XLA_FFI_API_MAJOR;                                                   \
    *minor = XLA_FFI_API_MINOR;                                                   \
  }

#endif  // EFFJAX_DEFORM_CONV_FFI_H_
