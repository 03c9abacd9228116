// XLA FFI handlers of deformable convolution: argument checks and the code common to CPU and CUDA.
//
// Python checks the arguments as well; these checks protect the memory accesses against direct
// calls.
#ifndef EFFJAX_DEFORM_CONV_FFI_H_
#define EFFJAX_DEFORM_CONV_FFI_H_

#include <cstdlib>
#include <limits>
#include <utility>

#include "deform_conv.h"
#include "ffi.h"

namespace effjax {

// The attribute `geometry`: the settings that the shapes of the arrays do not determine.
struct Window {
  int64_t kernel_h, kernel_w, stride_h, stride_w, padding_top, padding_left, dilation_h, dilation_w,
      offset_groups;
};

}  // namespace effjax

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    effjax::Window, StructMember<int64_t>("kernel_h"), StructMember<int64_t>("kernel_w"),
    StructMember<int64_t>("stride_h"), StructMember<int64_t>("stride_w"),
    StructMember<int64_t>("padding_top"), StructMember<int64_t>("padding_left"),
    StructMember<int64_t>("dilation_h"), StructMember<int64_t>("dilation_w"),
    StructMember<int64_t>("offset_groups"));

namespace effjax {

inline constexpr char kGeometry[] = "geometry", kSkipDx[] = "skip_dx";
using WindowAttribute = ffi::Attr<Window, kGeometry>;
using SkipDxAttribute = ffi::Attr<int64_t, kSkipDx>;

// Inputs of all handlers. check_shapes sets `g`.
struct Inputs {
  AnyBuffer x, offset, mask;
  Integers row;
  Geometry g{};
};

// Checks ranks and shapes, and sets the geometry. The number of rows is that of `columns`.
inline ffi::Error check_shapes(const Window& w, AnyBuffer columns, Inputs& in) {
  if (std::min({w.kernel_h, w.kernel_w, w.stride_h, w.stride_w, w.dilation_h, w.dilation_w,
                w.offset_groups}) < 1) {
    return invalid("the kernel's size, strides, dilations and offset_groups must be positive");
  }
  if (std::max({w.kernel_h, w.kernel_w, w.stride_h, w.stride_w, w.dilation_h, w.dilation_w,
                w.offset_groups, std::abs(w.padding_top / 2), std::abs(w.padding_left / 2)}) >=
      kMostOfAttributes) {
    return invalid("the kernel's size, strides, paddings and dilations must be below 2**30");
  }
  const auto sizes = in.x.dimensions(), rows = in.offset.dimensions();
  const auto chosen = columns.dimensions();
  if (sizes.size() != 4 || rows.size() != 4 || chosen.size() != 4 || in.row.element_count() != 1) {
    return invalid("x must be [N, H, W, C], not " + shape_text(in.x) +
                   ", offset [N, Ho, Wo, G*K*2], not " + shape_text(in.offset) +
                   ", columns [N, R, Wo, K*C], not " + shape_text(columns) +
                   ", and row one number");
  }
  if (!is_countable(in.x) || !is_countable(in.offset) || !is_countable(columns) ||
      std::max(rows[1], rows[2]) > std::numeric_limits<int32_t>::max()) {
    return invalid("x of shape " + shape_text(in.x) + " or offset of shape " +
                   shape_text(in.offset) + " is too large");
  }
  Geometry& g = in.g;
  g = Geometry{sizes[0], sizes[1], sizes[2], sizes[3], chosen[1], rows[2], w.kernel_h * w.kernel_w,
               w.offset_groups, rows[1], w.kernel_w, w.stride_h, w.stride_w, w.padding_top, w.padding_left,
               w.dilation_h, w.dilation_w, true};
  const int64_t taps = product_of({g.G, g.K});
  if (!has_shape(in.offset, {g.N, g.Ho, g.Wo, product_of({2, taps})}) || g.C % g.G != 0) {
    return invalid("offset of shape " + shape_text(in.offset) + " does not fit x of shape " +
                   shape_text(in.x) + " with " + std::to_string(g.K) + " taps and " +
                   std::to_string(g.G) + " offset groups");
  }
  g.has_mask = !has_shape(in.mask, {g.N, g.Ho, g.Wo, 0});
  if (g.has_mask && !has_shape(in.mask, {g.N, g.Ho, g.Wo, taps})) {
    return invalid("mask of shape " + shape_text(in.mask) + " does not fit offset of shape " +
                   shape_text(in.offset));
  }
  if (!has_shape(columns, {g.N, g.R, g.Wo, product_of({g.K, g.C})}) || g.R > g.Ho) {
    return invalid("columns of shape " + shape_text(columns) + " do not fit x of shape " +
                   shape_text(in.x));
  }
  return ffi::Error::Success();
}

// Checks shapes and dtypes.
inline ffi::Error check(const Window& window, AnyBuffer columns, ffi::DataType columns_dtype,
                        Inputs& in) {
  if (auto error = check_shapes(window, columns, in); error.failure()) return error;
  if (columns.element_type() != columns_dtype) {
    return invalid("columns must have x's dtype, and their gradient that of offset");
  }
  const auto accumulator = accumulator_of(in.x.element_type());
  if (in.offset.element_type() != accumulator || in.mask.element_type() != accumulator) {
    return invalid("offset and mask must be float32, or float64 where x is");
  }
  return ffi::Error::Success();
}

// A gradient before and after this call. XLA may give both the same buffer. The gradient of x is
// added to; those of offset and mask are overwritten in the rows of this call.
struct Gradient {
  AnyBuffer so_far, result;
};
struct Gradients {
  Gradient dx, doffset, dmask;
};

inline ffi::Error check_gradients(const Inputs& in, const Gradients& all) {
  const auto accumulator = accumulator_of(in.x.element_type());
  const std::pair<AnyBuffer, Gradient> pairs[] = {
      {in.x, all.dx}, {in.offset, all.doffset}, {in.mask, all.dmask}};
  for (const auto& [of, gradient] : pairs) {
    for (auto buffer : {gradient.so_far, gradient.result}) {
      if (buffer.element_type() != accumulator) {
        return invalid("gradients must be float32, or float64 where x is");
      }
      if (!same_shape(buffer, of)) {
        return invalid("gradients must have the shapes of x, offset and mask");
      }
    }
  }
  return ffi::Error::Success();
}

// Forward handler. Device::columns runs after all checks; Context is the device's thread pool or
// stream.
template <typename Device>
ffi::Error Columns(typename Device::Context context, AnyBuffer x, AnyBuffer offset, AnyBuffer mask,
                   Integers row, Result columns, WindowAttribute window) {
  Inputs in{x, offset, mask, row};
  if (auto error = check(*window, *columns, x.element_type(), in); error.failure()) return error;
  return Device::columns(context, in, *columns);
}

// Backward handler. With skip_dx, dx is returned unchanged.
template <typename Device>
ffi::Error ColumnsBackward(typename Device::Context context, AnyBuffer x, AnyBuffer offset,
                           AnyBuffer mask, Integers row, AnyBuffer dcolumns, AnyBuffer dx_so_far,
                           AnyBuffer doffset_so_far, AnyBuffer dmask_so_far, Result dx,
                           Result doffset, Result dmask, WindowAttribute window,
                           SkipDxAttribute skip_dx) {
  Inputs in{x, offset, mask, row};
  if (auto error = check(*window, dcolumns, accumulator_of(x.element_type()), in);
      error.failure()) {
    return error;
  }
  const Gradients all{{dx_so_far, *dx}, {doffset_so_far, *doffset}, {dmask_so_far, *dmask}};
  if (auto error = check_gradients(in, all); error.failure()) return error;
  for (const Gradient& gradient : {all.dx, all.doffset, all.dmask}) {
    auto error = copy_if_apart<Device>(context, gradient.so_far, gradient.result);
    if (error.failure()) return error;
  }
  return Device::gradients(context, in, dcolumns, *dx, *doffset, *dmask, *skip_dx != 0);
}

}  // namespace effjax

#endif  // EFFJAX_DEFORM_CONV_FFI_H_
