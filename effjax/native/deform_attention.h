// Geometry of deformable attention, compiled into the CPU and the CUDA handlers.
#ifndef EFFJAX_DEFORM_ATTENTION_H_
#define EFFJAX_DEFORM_ATTENTION_H_

#include <cstdint>
#include <vector>

namespace effjax {

struct Level {
  int64_t height, width;
};

// Values are [N, S, M, D]: the S pixels of all levels one after the other, M heads of D channels.
// Each of Q queries has P points on each level for each head. Locations are shares of a level's
// size, or pixels.
struct Attention {
  int64_t N, S, M, D, Q, P;
  std::vector<Level> levels;
  bool normalized;

  int64_t points() const { return static_cast<int64_t>(levels.size()) * P; }
};

}  // namespace effjax

#endif  // EFFJAX_DEFORM_ATTENTION_H_
