// XLA FFI handlers of RoI pooling: argument checks and the code common to CPU and CUDA.
//
// Python checks the arguments as well; these checks protect the memory accesses against direct
// calls.
#ifndef EFFJAX_ROI_FFI_H_
#define EFFJAX_ROI_FFI_H_

#include "ffi.h"
#include "roi.h"

namespace effjax {

// The attribute `pooling`: the settings that the shapes of the arrays do not determine.
struct PoolingAttributes {
  int64_t rows, columns, parts, of_inside;
  double margin;
};

}  // namespace effjax

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    effjax::PoolingAttributes, StructMember<int64_t>("rows"), StructMember<int64_t>("columns"),
    StructMember<int64_t>("parts"), StructMember<int64_t>("of_inside"),
    StructMember<double>("margin"));

namespace effjax {

inline constexpr char kPooling[] = "pooling";
using PoolingAttribute = ffi::Attr<PoolingAttributes, kPooling>;

// Inputs of both handlers. check sets `g`.
struct PoolingInputs {
  AnyBuffer x, first, step, count;
  Pooling g{};
};

// Checks shapes and dtypes, and sets the sizes. `y` is the result or its gradient.
inline ffi::Error check(const PoolingAttributes& a, AnyBuffer y, PoolingInputs& in) {
  const auto image = in.x.dimensions(), bins = in.first.dimensions();
  if (std::min({a.rows, a.columns, a.parts}) < 1 || !(a.margin >= 0) || !(a.margin <= 1) ||
      std::max({a.rows, a.columns, a.parts}) >= (int64_t{1} << 30)) {
    return invalid(
        "rows, columns and parts must be positive and below 2**30, and margin between 0 and 1");
  }
  if (image.size() != 4 || bins.size() != 5) {
    return invalid("x must be [N, H, W, C], not " + shape_text(in.x) +
                   ", and first [N, R, P, G, 2], not " + shape_text(in.first));
  }
  if (!is_countable(in.x) || !is_countable(in.first) || !is_countable(y)) {
    return invalid("x of shape " + shape_text(in.x) + ", first of shape " + shape_text(in.first) +
                   " or y of shape " + shape_text(y) + " is too large");
  }
  const int64_t channels = image[3] / (a.parts * a.parts), boxes = bins[1], groups = bins[3];
  in.g = Pooling{image[0], image[1],  image[2], channels, boxes, a.rows * a.columns,
                 groups,   a.rows, a.columns, a.parts,  a.margin, a.of_inside != 0};
  const Pooling& g = in.g;
  if (!has_shape(in.first, {g.N, g.R, g.P, g.G, 2}) || !has_shape(in.step, {g.N, g.R, 2}) ||
      !has_shape(in.count, {g.N, g.R, 2}) || !has_shape(y, {g.N, g.R, g.P, g.C})) {
    return invalid("first of shape " + shape_text(in.first) + ", step " + shape_text(in.step) +
                   ", count " + shape_text(in.count) + " or y " + shape_text(y) +
                   " does not fit x of shape " + shape_text(in.x));
  }
  if (g.G < 1 || g.C % g.G != 0 || image[3] != g.pixel_size() || g.H < 1 || g.W < 1) {
    return invalid("x of shape " + shape_text(in.x) + " must have parts**2 blocks of channels, "
                   "each of " + std::to_string(g.G) + " groups, and pixels");
  }
  const auto accumulator = accumulator_of(in.x.element_type());
  for (auto numbers : {in.first, in.step, in.count}) {
    if (numbers.element_type() != accumulator) {
      return invalid("first, step and count must be float32, or float64 where x is");
    }
  }
  if (y.element_type() != in.x.element_type()) return invalid("y must have x's dtype");
  return ffi::Error::Success();
}

// Forward handler: y = so_far + the pooled features. so_far of shape [N, R, P, 0] stands for zeros.
// Device::pool runs after all checks; Context is the device's thread pool or stream.
template <typename Device>
ffi::Error RoiPool(typename Device::Context context, AnyBuffer x, AnyBuffer first, AnyBuffer step,
                   AnyBuffer count, AnyBuffer so_far, Result y, PoolingAttribute pooling) {
  PoolingInputs in{x, first, step, count};
  if (auto error = check(*pooling, *y, in); error.failure()) return error;
  const bool adds = !has_shape(so_far, {in.g.N, in.g.R, in.g.P, 0});
  if (!adds) return Device::pool(context, in, *y, false);
  if (!same_shape(so_far, *y) || so_far.element_type() != y->element_type()) {
    return invalid("what y is added to, of shape " + shape_text(so_far) + ", must be as y");
  }
  if (auto error = copy_if_apart<Device>(context, so_far, *y); error.failure()) return error;
  return Device::pool(context, in, *y, true);
}

// Backward handler. dfirst of shape [N, R, P, G, 0] means that it is not needed.
template <typename Device>
ffi::Error RoiPoolBackward(typename Device::Context context, AnyBuffer x, AnyBuffer first,
                           AnyBuffer step, AnyBuffer count, AnyBuffer dy, Result dx,
                           Result dfirst, PoolingAttribute pooling) {
  PoolingInputs in{x, first, step, count};
  if (auto error = check(*pooling, dy, in); error.failure()) return error;
  const auto accumulator = accumulator_of(x.element_type());
  const bool moves = !has_shape(*dfirst, {in.g.N, in.g.R, in.g.P, in.g.G, 0});
  if (!same_shape(*dx, x) || (moves && !same_shape(*dfirst, first)) ||
      dx->element_type() != accumulator || dfirst->element_type() != accumulator) {
    return invalid("dx and dfirst must be as x and first, in float32, or in float64 where x is");
  }
  return Device::gradients(context, in, dy, *dx, *dfirst, moves);
}

}  // namespace effjax

#endif  // EFFJAX_ROI_FFI_H_
