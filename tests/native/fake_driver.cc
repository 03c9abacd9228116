// The functions of the CUDA driver that guard bands need, on host memory.
#include <cstdint>
#include <cstdlib>
#include <cstring>

extern "C" {
int live = 0, synchronizations = 0, is_full = 0;
int cuMemAlloc_v2(uint64_t* address, size_t size) {
  if (is_full) return 2;
  *address = reinterpret_cast<uint64_t>(std::malloc(size));
  ++live;
  return *address == 0 ? 2 : 0;
}
int cuMemFree_v2(uint64_t address) {
  std::free(reinterpret_cast<void*>(address));
  --live;
  return 0;
}
int cuMemsetD8_v2(uint64_t address, unsigned char value, size_t size) {
  std::memset(reinterpret_cast<void*>(address), value, size);
  return 0;
}
int cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t size) {
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), size);
  return 0;
}
int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t size) {
  std::memcpy(to, reinterpret_cast<void*>(from), size);
  return 0;
}
int cuCtxSynchronize() {
  ++synchronizations;
  return 0;
}
}
