// What a deformable convolution samples, compiled into the CPU and the CUDA handlers.
#ifndef EFFJAX_DEFORM_CONV_H_
#define EFFJAX_DEFORM_CONV_H_

#include "sampling.h"

namespace effjax {

// Sizes, all positive but for those of an empty result. Images are [N, H, W, C], the output rows
// [first_row, first_row + R) of Wo pixels; K = kernel_h * kernel_w taps, G groups of C / G channels.
struct Geometry {
  int64_t N, H, W, C, R, Wo, K, G;
  int64_t kernel_w, stride_h, stride_w, padding_top, padding_left, dilation_h, dilation_w;
  bool has_mask;
};

// Where tap k of output pixel (row, column) reads, before its offset. 64-bit divisions are slow.
template <typename A>
EFFJAX_INLINE A base_y(const Geometry& g, int64_t row, int32_t k) {
  return A(row * g.stride_h - g.padding_top + k / int32_t(g.kernel_w) * g.dilation_h);
}
template <typename A>
EFFJAX_INLINE A base_x(const Geometry& g, int64_t column, int32_t k) {
  return A(column * g.stride_w - g.padding_left + k % int32_t(g.kernel_w) * g.dilation_w);
}

}  // namespace effjax

#endif  // EFFJAX_DEFORM_CONV_H_
