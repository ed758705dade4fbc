// Gradients are carried in fp16 times a power of two that brings the largest incoming one to [1/16, 1/8).
struct Scale { float scale, inverse; };

// From the maxima that the blocks of prepare_backward wrote; 1 if they are all 0 or not finite. All threads must call it.
__device__ __forceinline__ Scale gradient_scale(const float* maxima, int count) {
  __shared__ float warp_maxima[32];
  float largest = 0.0f;
  for (int i = threadIdx.x; i < count; i += blockDim.x) largest = fmaxf(largest, maxima[i]);
  for (int step = 16; step; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, step));
  if (threadIdx.x % 32 == 0) warp_maxima[threadIdx.x / 32] = largest;
  __syncthreads();
  for (int i = 0; i < (int)blockDim.x / 32; ++i) largest = fmaxf(largest, warp_maxima[i]);
  const unsigned int exponent = __float_as_uint(largest) >> 23 & 0xFF;
  const bool usable = exponent > 0 && exponent < 250;
  return {__uint_as_float((usable ? 250 - exponent : 127) << 23), __uint_as_float((usable ? exponent + 4 : 127) << 23)};
}
