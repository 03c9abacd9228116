// XLA FFI handlers of deformable attention: argument checks and the code common to CPU and CUDA.
//
// Python checks the arguments as well; these checks protect the memory accesses against direct
// calls.
#ifndef EFFJAX_DEFORM_ATTENTION_FFI_H_
#define EFFJAX_DEFORM_ATTENTION_FFI_H_

#include "deform_attention.h"
#include "ffi.h"

namespace effjax {

inline constexpr char kSizes[] = "sizes", kNormalized[] = "normalized";
// Attributes: height and width of each level, and 1 if locations are relative to them.
using SizesAttribute = ffi::Attr<ffi::Span<const int64_t>, kSizes>;
using NormalizedAttribute = ffi::Attr<int64_t, kNormalized>;

// Inputs of both handlers.
struct AttentionInputs {
  AnyBuffer value, locations, weights;
};

// Checks ranks and shapes, and sets the sizes. `y` is the result or its gradient.
inline ffi::Error check_attention_shapes(const AttentionInputs& in, AnyBuffer y,
                                         ffi::Span<const int64_t> sizes, bool normalized,
                                         Attention& g) {
  const auto value = in.value.dimensions(), places = in.locations.dimensions();
  if (value.size() != 4 || places.size() != 6) {
    return invalid("value must be [N, S, M, D], not " + shape_text(in.value) +
                   ", and locations [N, Q, M, L, P, 2], not " + shape_text(in.locations));
  }
  if (!is_countable(in.value) || !is_countable(in.locations) || !is_countable(y)) {
    return invalid("value of shape " + shape_text(in.value) + " or locations of shape " +
                   shape_text(in.locations) + " is too large");
  }
  g = Attention{value[0], value[1], value[2], value[3], places[1], places[4], {}, normalized};
  int64_t pixels = 0;
  for (size_t l = 0; l + 1 < sizes.size(); l += 2) {
    for (int64_t size : {sizes[l], sizes[l + 1]}) {  // products and their sums fit 64 bits
      if (size < 1 || size >= (int64_t{1} << 30)) {
        return invalid("sizes of levels must be positive, and below 2**30");
      }
    }
    g.levels.push_back({sizes[l], sizes[l + 1]});
    pixels = std::min(pixels + sizes[l] * sizes[l + 1], int64_t{1} << 30);
  }
  const auto levels = static_cast<int64_t>(g.levels.size());
  if (sizes.size() % 2 || levels == 0 || pixels != g.S || pixels >= (int64_t{1} << 30)) {
    return invalid("the sizes of the levels must be (H, W) each, and be the pixels of value " +
                   shape_text(in.value));
  }
  if (!has_shape(in.locations, {g.N, g.Q, g.M, levels, g.P, 2}) ||
      !has_shape(in.weights, {g.N, g.Q, g.M, levels, g.P})) {
    return invalid("locations of shape " + shape_text(in.locations) + " and weights of shape " +
                   shape_text(in.weights) + " do not fit value of shape " + shape_text(in.value) +
                   " with " + std::to_string(levels) + " levels");
  }
  if (!has_shape(y, {g.N, g.Q, g.M, g.D})) {
    return invalid("the result of shape " + shape_text(y) + " must be [N, Q, M, D] as value " +
                   shape_text(in.value));
  }
  return ffi::Error::Success();
}

// Checks shapes and dtypes.
inline ffi::Error check_attention(const AttentionInputs& in, AnyBuffer y,
                                  ffi::Span<const int64_t> sizes, bool normalized, Attention& g) {
  if (auto error = check_attention_shapes(in, y, sizes, normalized, g); error.failure()) {
    return error;
  }
  if (y.element_type() != in.value.element_type()) return invalid("y must have value's dtype");
  const auto accumulator = accumulator_of(in.value.element_type());
  if (in.locations.element_type() != accumulator || in.weights.element_type() != accumulator) {
    return invalid("locations and weights must be float32, or float64 where value is");
  }
  return ffi::Error::Success();
}

// Forward handler. Device::attend runs after all checks; Context is the device's thread pool or
// stream.
template <typename Device>
ffi::Error MsDeformAttn(typename Device::Context context, AnyBuffer value, AnyBuffer locations,
                        AnyBuffer weights, Result y, SizesAttribute sizes,
                        NormalizedAttribute normalized) {
  const AttentionInputs in{value, locations, weights};
  Attention g;
  if (auto error = check_attention(in, *y, *sizes, *normalized != 0, g); error.failure()) {
    return error;
  }
  return Device::attend(context, in, g, *y);
}

// Backward handler. On devices that can leave it out, dvalue of shape [N, 0, M, D] means that it is
// not needed.
template <typename Device>
ffi::Error MsDeformAttnBackward(typename Device::Context context, AnyBuffer value,
                                AnyBuffer locations, AnyBuffer weights, AnyBuffer dy, Result dvalue,
                                Result dlocations, Result dweights, SizesAttribute sizes,
                                NormalizedAttribute normalized) {
  const AttentionInputs in{value, locations, weights};
  Attention g;
  if (auto error = check_attention(in, dy, *sizes, *normalized != 0, g); error.failure()) {
    return error;
  }
  const bool skips = Device::kSkipsValue && has_shape(*dvalue, {g.N, 0, g.M, g.D});
  const auto accumulator = weights.element_type();
  if (!(skips || same_shape(*dvalue, value)) || !same_shape(*dlocations, locations) ||
      !same_shape(*dweights, weights) || dvalue->element_type() != accumulator ||
      dlocations->element_type() != accumulator || dweights->element_type() != accumulator) {
    return invalid("gradients must have the shapes of their arrays, and the dtype of weights");
  }
  return Device::gradients(context, in, g, dy, *dvalue, *dlocations, *dweights);
}

}  // namespace effjax

#endif  // EFFJAX_DEFORM_ATTENTION_FFI_H_
