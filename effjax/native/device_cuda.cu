// The available driver and GPUs, for the loader. It creates no context and keeps no state.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

// CUDA's versions as 1000 * major + 10 * minor: the library's own, and what the driver can run, 0
// where there is none. The GPUs, and the newest's compute capability as 10 * major + minor.
extern "C" void effjax_cuda_devices(int32_t* built, int32_t* driver, int32_t* count,
                                    int32_t* newest) {
  *built = CUDART_VERSION;
  *driver = *count = *newest = 0;
  if (cudaDriverGetVersion(driver) != cudaSuccess) *driver = 0;
  if (*driver == 0 || cudaGetDeviceCount(count) != cudaSuccess) *count = 0;
  for (int device = 0; device < *count; ++device) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    *newest = std::max<int32_t>(*newest, 10 * major + minor);
  }
  cudaGetLastError();  // what failed here is not the failure of a kernel
}
