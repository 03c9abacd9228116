// Sizes and sample positions of deformable convolution, shared by the CPU and the CUDA
// implementation.
#ifndef EFFJAX_DEFORM_CONV_H_
#define EFFJAX_DEFORM_CONV_H_

#include "sampling.h"

namespace effjax {

// Sizes of one call. They are positive, unless the result is empty.
//
// x is [N, H, W, C] and the output [N, Ho, Wo]. One call handles the R output rows from first_row
// on. There are K = kernel_h * kernel_w taps and G offset groups of C / G channels.
struct Geometry {
  int64_t N, H, W, C, R, Wo, K, G, Ho;
  int64_t kernel_w, stride_h, stride_w, padding_top, padding_left, dilation_h, dilation_w;
  bool has_mask;
};

// Position of tap (i, j) of output pixel (row, column), without its offset.
template <typename A>
EFFJAX_INLINE A base_y(const Geometry& g, int64_t row, int64_t i) {
  return A(row * g.stride_h - g.padding_top + i * g.dilation_h);
}
template <typename A>
EFFJAX_INLINE A base_x(const Geometry& g, int64_t column, int64_t j) {
  return A(column * g.stride_w - g.padding_left + j * g.dilation_w);
}

// Index of the first of the G * K taps of output pixel (row, column) in offset and mask, which are
// [N, Ho, Wo, G, K]. A row out of range, from an invalid first_row, is clamped, so that no access
// is out of bounds.
template <typename I>
EFFJAX_INLINE I first_tap(const Geometry& g, I n, int64_t row, I column) {
  const int64_t last = g.Ho - 1, within = row < 0 ? 0 : row < last ? row : last;
  return ((n * I(g.Ho) + I(within)) * I(g.Wo) + column) * I(g.G * g.K);
}

}  // namespace effjax

#endif  // EFFJAX_DEFORM_CONV_H_
