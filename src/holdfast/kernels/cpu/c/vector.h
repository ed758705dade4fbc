/* Vectors of the instruction set this file is compiled for, and the pointwise functions of the gates.
 *
 * Accuracy: sigmoid and tanh are within 2.3e-7 relative over their whole range. NaN stays NaN. */
#ifndef HOLDFAST_VECTOR_H
#define HOLDFAST_VECTOR_H

#include <stdint.h>
#include <string.h>

#if defined(HOLDFAST_AVX512) || defined(HOLDFAST_AVX2)
#include <immintrin.h>
#endif

/* MAX_ROWS x 4 accumulators, 4 weights and a broadcast have to fit into the vector registers. */
#if defined(HOLDFAST_AVX512)
#define ISA_NAME "avx512"
#define LANES 16
#define MAX_ROWS 6
#define OUTER_ROWS 4
#elif defined(HOLDFAST_AVX2)
#define ISA_NAME "avx2"
#define LANES 8
#define MAX_ROWS 3
#define OUTER_ROWS 2
#else
#define ISA_NAME "plain"
#define LANES 4
#if defined(__aarch64__)
#define MAX_ROWS 6
#define OUTER_ROWS 4
#else
#define MAX_ROWS 3
#define OUTER_ROWS 2
#endif
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef float vec_in_memory __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

INLINE vec load(const float *p) { return *(const vec_in_memory *)p; }
INLINE void store(float *p, vec v) { *(vec_in_memory *)p = v; }

#if defined(HOLDFAST_AVX512)

INLINE vec splat(float s) { return (vec)_mm512_set1_ps(s); }
INLINE vec clamp(vec x, float low, float high) { /* the operand order lets NaN through */
    return (vec)_mm512_min_ps((__m512)splat(high), _mm512_max_ps((__m512)splat(low), (__m512)x));
}
INLINE vec round_nearest(vec x) { return (vec)_mm512_roundscale_ps((__m512)x, 8); }
INLINE vec scale2(vec x, vec n) { return (vec)_mm512_scalef_ps((__m512)x, (__m512)n); }
INLINE vec reciprocal(vec x) { /* 14 bits, and one Newton step */
    vec y = (vec)_mm512_rcp14_ps((__m512)x);
    return y + y * (splat(1.0f) - x * y);
}
/* The first `count` floats, zeros after them; and their store, which touches nothing after them. */
INLINE vec load_first(const float *p, int64_t count) {
    return count >= LANES ? load(p) : (vec)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), p);
}
INLINE void store_first(float *p, vec v, int64_t count) {
    if (count >= LANES) store(p, v);
    else _mm512_mask_storeu_ps(p, (__mmask16)((1u << count) - 1), (__m512)v);
}

#else

INLINE vec splat(float s) {
#if defined(HOLDFAST_AVX2)
    return (vec)_mm256_set1_ps(s);
#else
    return (vec){s, s, s, s};
#endif
}
INLINE vec clamp(vec x, float low, float high) {
#if defined(HOLDFAST_AVX2)
    return (vec)_mm256_min_ps((__m256)splat(high), _mm256_max_ps((__m256)splat(low), (__m256)x));
#else
    ivec under = x < splat(low), over = x > splat(high); /* both false for NaN */
    return (vec)((under & (ivec)splat(low)) | (over & (ivec)splat(high)) | (~(under | over) & (ivec)x));
#endif
}
INLINE vec round_nearest(vec x) { /* |x| < 2^22: the mantissa of the sum has no room for a fraction */
    const vec magic = splat(12582912.0f);
    vec sum = x + magic;
    return sum - magic;
}
INLINE vec scale2(vec x, vec n) { /* |n| <= 126, whole; a NaN in x survives the product whatever n became */
    const vec magic = splat(12582912.0f);
    return x * (vec)(((uvec)(n + magic) + 127) << 23);
}
INLINE vec reciprocal(vec x) { return splat(1.0f) / x; }
INLINE vec load_first(const float *p, int64_t count) {
    if (count >= LANES) return load(p);
    float first[LANES] = {0};
    for (int64_t i = 0; i < count; i++) first[i] = p[i];
    return load(first);
}
INLINE void store_first(float *p, vec v, int64_t count) {
    if (count >= LANES) {
        store(p, v);
        return;
    }
    float first[LANES];
    store(first, v);
    for (int64_t i = 0; i < count; i++) p[i] = first[i];
}

#endif

/* Denormal numbers cost some CPUs a hundred cycles each, and a gradient that fades over a long sequence is full of
 * them. They count as zero inside a call; the caller's setting comes back afterwards. */
INLINE unsigned int flush_denormals(void) {
#if defined(__SSE__)
    unsigned int mode = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(mode | 0x8040);
    return mode;
#else
    return 0;
#endif
}
INLINE void restore_denormals(unsigned int mode) {
#if defined(__SSE__)
    __builtin_ia32_ldmxcsr(mode);
#else
    (void)mode;
#endif
}

/* exp(x) = 2^n (1 + r q(r)) with r in +-ln(2)/2; q is a minimax polynomial of (exp(r) - 1) / r, 2.3e-8 relative. */
INLINE vec reduce(vec x, vec *n, vec *q) {
    *n = round_nearest(x * splat(1.44269504f));
    vec r = x - *n * splat(0.693359375f); /* ln 2 in two pieces, the first exact in few bits */
    r = r - *n * splat(-2.12194440e-4f);
    vec p = splat(0.00138888729f);
    p = p * r + splat(0.00836910401f);
    p = p * r + splat(0.0416671373f);
    p = p * r + splat(0.166665062f);
    p = p * r + splat(0.49999997f);
    *q = p * r + splat(1.0f);
    return r;
}

INLINE vec sigmoid(vec x) {
    vec n, q, r = reduce(clamp(-x, -86.0f, 86.0f), &n, &q);
    return reciprocal(splat(1.0f) + scale2(r * q + splat(1.0f), n));
}

/* (e - 1) / (e + 1) with e = exp(2x), and e - 1 without cancellation near 0. */
INLINE vec tanh_(vec x) {
    vec n, q, r = reduce(clamp(x + x, -20.0f, 20.0f), &n, &q);
    vec scale = scale2(splat(1.0f), n);
    vec e1 = scale * r * q + (scale - splat(1.0f));
    return e1 * reciprocal(e1 + splat(2.0f));
}

#endif
