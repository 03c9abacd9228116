// Sample positions of a deformable convolution, compiled into the CPU and the CUDA handlers.
#ifndef EFFJAX_DEFORM_CONV_H_
#define EFFJAX_DEFORM_CONV_H_

#include "sampling.h"

namespace effjax {

// Sizes, all positive but for those of an empty result. Images are [N, H, W, C], the output rows
// [first_row, first_row + R) of Ho, of Wo pixels each; K = kernel_h * kernel_w taps, G groups of
// C / G channels.
struct Geometry {
  int64_t N, H, W, C, R, Wo, K, G, Ho;
  int64_t kernel_w, stride_h, stride_w, padding_top, padding_left, dilation_h, dilation_w;
  bool has_mask;
};

// Position of tap (i, j) of output pixel (row, column), before its offset.
template <typename A>
EFFJAX_INLINE A base_y(const Geometry& g, int64_t row, int64_t i) {
  return A(row * g.stride_h - g.padding_top + i * g.dilation_h);
}
template <typename A>
EFFJAX_INLINE A base_x(const Geometry& g, int64_t column, int64_t j) {
  return A(column * g.stride_w - g.padding_left + j * g.dilation_w);
}

// Index of the first of the positions and masks [N, Ho, Wo, G, K] of pixel
// (row, column). Rows out of range, from a wrong first_row, are clamped to the last.
template <typename I>
EFFJAX_INLINE I first_tap(const Geometry& g, I n, int64_t row, I column) {
  const int64_t last = g.Ho - 1, within = row < 0 ? 0 : row < last ? row : last;
  return ((n * I(g.Ho) + I(within)) * I(g.Wo) + column) * I(g.G * g.K);
}

}  // namespace effjax

#endif  // EFFJAX_DEFORM_CONV_H_
