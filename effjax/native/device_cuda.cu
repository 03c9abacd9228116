// Query of the CUDA driver and GPUs for the Python loader. Creates no CUDA context.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

// Writes the CUDA version this library was built with and the newest version that the driver
// supports, both as 1000 * major + 10 * minor; the driver's is 0 without a driver. Writes the
// number of GPUs and the highest compute capability among them as 10 * major + minor.
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
  cudaGetLastError();  // clear the error state, which the next kernel launch would report
}
