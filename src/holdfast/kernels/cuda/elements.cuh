// Reading and writing tensors of any of the three element types: KIND 0 is fp32, 1 bf16, 2 fp16.

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

template <int KIND> __device__ __forceinline__ float read(const void* p, i64 i) {
  if constexpr (KIND == 0) return ((const float*)p)[i];
  const u16 bits = ((const u16*)p)[i];
  if constexpr (KIND == 1) return __uint_as_float((u32)bits << 16);
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
  return f;
}
__device__ __forceinline__ u16 to_half(float f) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(f));
  return bits;
}
template <int KIND> __device__ __forceinline__ void write(void* p, i64 i, float f) {
  if constexpr (KIND == 0) ((float*)p)[i] = f;
  else if constexpr (KIND == 2) ((u16*)p)[i] = to_half(f);
  else asm volatile("{.reg .b16 h; cvt.rn.bf16.f32 h, %1; st.global.b16 [%0], h;}" ::"l"((u16*)p + i), "f"(f) : "memory");
}
// 8 consecutive elements starting at a multiple of 8; the compiler turns the aligned copies into 16-byte accesses.
template <int KIND> __device__ __forceinline__ void read8(float (&v)[8], const void* p, i64 i) {
  if constexpr (KIND == 0) {
    const float4 a = ((const float4*)p)[i / 4], b = ((const float4*)p)[i / 4 + 1];
    v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w; v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
  } else {
    const uint4 a = ((const uint4*)p)[i / 8];
    const u32 words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const u16 bits = words[k / 2] >> (k % 2 * 16);
      if constexpr (KIND == 1) v[k] = __uint_as_float((u32)bits << 16);
      else asm("cvt.f32.f16 %0, %1;" : "=f"(v[k]) : "h"(bits));
    }
  }
}
template <int KIND> __device__ __forceinline__ void write8(void* p, i64 i, const float (&v)[8]) {
  if constexpr (KIND == 0) {
    ((float4*)p)[i / 4] = make_float4(v[0], v[1], v[2], v[3]);
    ((float4*)p)[i / 4 + 1] = make_float4(v[4], v[5], v[6], v[7]);
  } else {
    u32 words[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if constexpr (KIND == 1) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[k]) : "f"(v[2 * k + 1]), "f"(v[2 * k]));
      else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[k]) : "f"(v[2 * k + 1]), "f"(v[2 * k]));
    ((uint4*)p)[i / 8] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}
__device__ __forceinline__ float saturate_half(float f) {  // NaN stays NaN
  asm("{max.NaN.f32 %0, %0, 0fC77FE000; min.NaN.f32 %0, %0, 0f477FE000;}" : "+f"(f));
  return f;
}
