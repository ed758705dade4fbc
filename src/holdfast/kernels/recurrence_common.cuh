// Shared by recurrence_forward.cu and recurrence_backward.cu: types, tile constants, PTX wrappers.
//
// One thread block owns NH hidden units of one batch group and keeps its slice of W_hh in shared memory as fp16. A batch
// group is SPLIT blocks; they exchange h (forward) or gate gradients (backward) through global memory, which is L2 here,
// and count arrivals per chunk of R rows. With SPLIT == 1 a block is alone and exchanges through shared memory.
//
// A warp computes a tile of 16 * MT rows x WU units, for all gates. The columns of W_hh are permuted in shared memory so
// that a thread ends up with UT consecutive units of all gates of its rows: the pointwise part needs no exchange, and
// global accesses are UT elements wide.
//
// Compile-time constants, from the host: GRU, HIDDEN, NH, WU, MT, WARP_ROWS, KC (columns of one pipeline stage), STAGES,
// SAVE, RESETS, FILL, ONE_CHUNK (a block sees one chunk of rows, so carried values stay in registers),
// Y_KIND (0 fp32, 1 bf16, 2 fp16).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int GATES = GRU ? 3 : 4;
constexpr int SPLIT = (HIDDEN + NH - 1) / NH;
constexpr int WARP_UNITS = NH / WU;
constexpr int WARPS = WARP_ROWS * WARP_UNITS;
constexpr int THREADS = 32 * WARPS;
constexpr int R = 16 * MT * WARP_ROWS;
constexpr int UT = WU / 4;
constexpr int J = WU / 8;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void ldmatrix4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 bytes from global to shared memory through L2 only; zeros where `bytes` is 0.
__device__ __forceinline__ void copy_async(u32 target, const void* source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

__device__ __forceinline__ float half_low(u32 v) {
  float f; asm("{.reg .f16 a,b; mov.b32 {a,b}, %1; cvt.f32.f16 %0, a;}" : "=f"(f) : "r"(v)); return f;
}
__device__ __forceinline__ float half_high(u32 v) {
  float f; asm("{.reg .f16 a,b; mov.b32 {a,b}, %1; cvt.f32.f16 %0, b;}" : "=f"(f) : "r"(v)); return f;
}
__device__ __forceinline__ u32 pack_half(float low, float high) {
  u32 v; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low)); return v;
}
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 v; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low)); return v;
}

__device__ __forceinline__ float sigmoid(float x) {
  float e, r;
  asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"(-1.4426950408889634f * x));
  asm("rcp.approx.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
  return r;
}
__device__ __forceinline__ float tanh_(float x) { return 2.0f * sigmoid(2.0f * x) - 1.0f; }

// N 32-bit words, as wide as alignment allows: every run of UT elements starts at a multiple of UT.
template <int N> __device__ __forceinline__ void load_words(u32 (&v)[N], const void* p) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4)
      asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[i]), "=r"(v[i + 1]), "=r"(v[i + 2]), "=r"(v[i + 3])
                   : "l"((const u32*)p + i));
  } else if constexpr (N == 2) {
    asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "l"(p));
  } else {
    static_assert(N == 1);
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v[0]) : "l"(p));
  }
}
template <int N> __device__ __forceinline__ void store_words(void* p, const u32 (&v)[N]) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4)
      asm volatile("st.global.v4.u32 [%4], {%0,%1,%2,%3};" ::"r"(v[i]), "r"(v[i + 1]), "r"(v[i + 2]), "r"(v[i + 3]),
                   "l"((u32*)p + i) : "memory");
  } else if constexpr (N == 2) {
    asm volatile("st.global.v2.u32 [%2], {%0,%1};" ::"r"(v[0]), "r"(v[1]), "l"(p) : "memory");
  } else {
    static_assert(N == 1);
    asm volatile("st.global.u32 [%1], %0;" ::"r"(v[0]), "l"(p) : "memory");
  }
}

typedef u32 HalfRun[UT / 2];   // UT fp16 values
typedef u32 FloatRun[UT];      // UT fp32 values
constexpr int Y_WORDS = Y_KIND == 0 ? UT : UT / 2;
constexpr int Y_BYTES = Y_KIND == 0 ? 4 : 2;

__device__ __forceinline__ float half_at(const HalfRun& run, int u) { return u & 1 ? half_high(run[u / 2]) : half_low(run[u / 2]); }
__device__ __forceinline__ void to_half_run(HalfRun& run, const float (&v)[UT]) {
#pragma unroll
  for (int u = 0; u < UT; u += 2) run[u / 2] = pack_half(v[u], v[u + 1]);
}
__device__ __forceinline__ float y_at(const u32 (&run)[Y_WORDS], int u) {
  if constexpr (Y_KIND == 0) return __uint_as_float(run[u]);
  if constexpr (Y_KIND == 1) return __uint_as_float(u & 1 ? run[u / 2] & 0xFFFF0000u : run[u / 2] << 16);
  return u & 1 ? half_high(run[u / 2]) : half_low(run[u / 2]);
}
__device__ __forceinline__ void store_y(void* y, i64 index, const float (&v)[UT]) {
  u32 words[Y_WORDS];
#pragma unroll
  for (int u = 0; u < UT; u += 2) {
    if constexpr (Y_KIND == 0) { words[u] = __float_as_uint(v[u]); words[u + 1] = __float_as_uint(v[u + 1]); }
    else words[u / 2] = Y_KIND == 1 ? pack_bf16(v[u], v[u + 1]) : pack_half(v[u], v[u + 1]);
  }
  store_words(( u8*)y + index * Y_BYTES, words);
}

// Blocks of one group count their arrivals at a chunk; `wait` returns once `count` have arrived.
__device__ __forceinline__ void arrive(u32* counter) {
  __syncthreads();
  if (threadIdx.x == 0) asm volatile("fence.acq_rel.gpu; red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ void wait(const u32* counter, u32 count) {
  if (threadIdx.x == 0) {
    u32 seen;
    do { asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory"); } while (seen < count);
  }
  __syncthreads();
}

// acc += A[rows, K] * B[K, tiles], both in shared memory; `a` and `b` are this lane's ldmatrix addresses at k = 0.
// Successive k go to SETS accumulators in turn, so that few tiles do not wait for each other's results.
template <int K, int TILES, int SETS, int A_STRIDE, int B_STRIDE>
__device__ __forceinline__ void multiply(float (&acc)[SETS][MT][TILES][4], u32 a, u32 b) {
#pragma unroll
  for (int k = 0; k < K; k += 16) {
    u32 fa[MT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m) ldmatrix4(fa[m], a + 2 * (m * 16 * A_STRIDE + k));
#pragma unroll
    for (int n = 0; n < TILES; n += 2) {  // an odd last tile reads 8 rows past its end: padding, multiplied by nobody
      u32 fb[4];
      ldmatrix4(fb, b + 2 * (n * 8 * B_STRIDE + k));
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        mma(acc[k / 16 % SETS][m][n], fa[m], fb[0], fb[1]);
        if (n + 1 < TILES) mma(acc[k / 16 % SETS][m][n + 1 < TILES ? n + 1 : n], fa[m], fb[2], fb[3]);
      }
    }
  }
}

template <int TILES, int SETS> __device__ __forceinline__ void clear(float (&acc)[SETS][MT][TILES][4]) {
#pragma unroll
  for (int i = 0; i < SETS * MT * TILES * 4; ++i) (&acc[0][0][0][0])[i] = 0.0f;
}

// acc += A * B where A streams from global memory through STAGES buffers of KC columns.
// source: first row of the chunk, `row_stride` elements apart; rows at or beyond `rows` and columns beyond K are zeros.
template <int K, int TILES, int SETS, int B_STRIDE>
__device__ __forceinline__ void multiply_streamed(float (&acc)[SETS][MT][TILES][4], const u16* source, i64 row_stride, int rows,
                                                  u16* ring, u32 a_lane, u32 b) {
  constexpr int STRIDE = KC + 8, PIECES = KC / 8, BUFFER = R * STRIDE, COUNT = (K + KC - 1) / KC;
  auto fetch = [&](int piece) {
    if (piece < COUNT) {
      u16* target = ring + (piece % STAGES) * BUFFER;
      for (int i = threadIdx.x; i < R * PIECES; i += THREADS) {
        int row = i / PIECES, k = piece * KC + (i % PIECES) * 8;
        bool inside = row < rows && k < K;
        copy_async(shared_address(target + row * STRIDE + (i % PIECES) * 8), source + (inside ? row * row_stride + k : 0),
                   inside ? 16 : 0);
      }
    }
    copy_commit();
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) fetch(s);
#pragma unroll 1
  for (int piece = 0; piece < COUNT; ++piece) {
    copy_wait<STAGES - 2>();
    __syncthreads();
    fetch(piece + STAGES - 1);
    multiply<KC, TILES, SETS, STRIDE, B_STRIDE>(acc, shared_address(ring + (piece % STAGES) * BUFFER) + a_lane,
                                                b + 2 * piece * KC);
  }
}
