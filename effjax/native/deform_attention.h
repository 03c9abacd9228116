// Sizes of deformable attention, shared by the CPU and the CUDA implementation.
#ifndef EFFJAX_DEFORM_ATTENTION_H_
#define EFFJAX_DEFORM_ATTENTION_H_

#include <cstdint>
#include <vector>

namespace effjax {

// Height and width of one level of the feature pyramid.
struct Level {
  int64_t height, width;
};

// Sizes of one call.
//
// `value` is [N, S, M, D]: M heads of D channels for the S pixels of all levels, which are stored
// one level after the other. `locations` is [N, Q, M, L, P, 2] and `weights` [N, Q, M, L, P]: each
// of the Q queries has P points per level and head. Locations are (x, y), relative to the size of
// the level if `normalized` and in pixels otherwise.
struct Attention {
  int64_t N, S, M, D, Q, P;
  std::vector<Level> levels;
  bool normalized;

  int64_t points() const { return static_cast<int64_t>(levels.size()) * P; }
};

}  // namespace effjax

#endif  // EFFJAX_DEFORM_ATTENTION_H_
