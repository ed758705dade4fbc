// Shared by recurrence_forward.cu and recurrence_backward.cu: types, tile constants, PTX wrappers.
//
// One thread block owns NH hidden units of one batch group and keeps its slice of W_hh on chip as fp16. A batch group is
// SPLIT blocks; they exchange h (forward) or gate gradients (backward) through global memory (in practice L2) and count
// arrivals per chunk of R rows. With SPLIT == 1 a block works alone and exchanges through shared memory. With CLUSTER a batch
// group is a cluster, whose blocks write into each other's shared memory; there a team has one chunk.
//
// TEAMS teams of warps in a block work on different chunks with the same weights: one computes while another waits. A warp
// computes a tile of 8 * HALVES * MT rows x WU units, for all gates. The columns of W_hh are permuted so that a thread ends
// up with UT consecutive units of all gates of its rows: the pointwise part needs no exchange, and global accesses are
// UT elements wide.
//
// Compile-time constants, from the host: GRU, HIDDEN, NH, WU, HALVES, MT, WARP_ROWS, TEAMS, KC (columns of one pipeline
// stage), STAGES, W_REGISTERS (weights in registers, not shared memory), SHARE (blocks that divide the columns, backward), CLUSTER, SAVE, RESETS, RESET_VALUES (resets start
// from values other than 0), ONE_CHUNK (a team sees one chunk of rows, so carried values stay in registers), Y_KIND (0 fp32,
// 1 bf16, 2 fp16).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int GATES = GRU ? 3 : 4;
constexpr int SPLIT = (HIDDEN + NH - 1) / NH;
constexpr int WARP_UNITS = NH / WU;
constexpr int WARPS = WARP_ROWS * WARP_UNITS;
constexpr int TEAM_THREADS = 32 * WARPS;
constexpr int THREADS = TEAMS * TEAM_THREADS;
constexpr int WARP_HEIGHT = 8 * HALVES * MT;
constexpr int R = WARP_HEIGHT * WARP_ROWS;
static_assert(HALVES == 2 || MT == 1);
constexpr int UT = WU / 4;
constexpr int J = WU / 8;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void ldmatrix4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void ldmatrix2(u32& r0, u32& r1, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r0), "=r"(r1) : "r"(address) : "memory");
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

constexpr float MINUS_LOG2E = -1.4426950408889634f;

// 2^e, at most exp(20) so that four of them still multiply; NaN stays NaN.
__device__ __forceinline__ float exp2_bounded(float e) {
  asm("{min.NaN.f32 %0, %0, 0f41E6D4C2; ex2.approx.ftz.f32 %0, %0;}" : "+f"(e));
  return e;
}
__device__ __forceinline__ float reciprocal(float x) {
  float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r;
}
__device__ __forceinline__ float tanh_(float x) {
  const float e = exp2_bounded(2.0f * MINUS_LOG2E * x);
  return __fmul_rn(1.0f - e, reciprocal(1.0f + e));  // not fused with what is added to it: see recurrence_forward.cu
}
// Sigmoids from a, b = -log2(e) times their arguments, with one reciprocal: special functions are the scarce unit.
__device__ __forceinline__ void sigmoid2(float& a, float& b) {
  const float ea = 1.0f + exp2_bounded(a), eb = 1.0f + exp2_bounded(b), r = reciprocal(ea * eb);
  a = r * eb;
  b = r * ea;
}
// From -log2(e) times the arguments of i, f, o and -2 log2(e) times that of g: sigmoids and a tanh, with one reciprocal.
__device__ __forceinline__ void lstm_gates(float& i, float& f, float& g, float& o) {
  const float eg = exp2_bounded(g);
  const float di = 1.0f + exp2_bounded(i), df = 1.0f + exp2_bounded(f), dg = 1.0f + eg, d_o = 1.0f + exp2_bounded(o);
  const float input = di * df, output = dg * d_o, r = reciprocal(input * output);
  const float r_input = r * output, r_output = r * input;
  i = r_input * df;
  f = r_input * di;
  g = r_output * d_o * (1.0f - eg);
  o = r_output * dg;
}

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
__device__ __forceinline__ void store_y(void* y, u32 index, const float (&v)[UT]) {
  u32 words[Y_WORDS];
#pragma unroll
  for (int u = 0; u < UT; u += 2) {
    if constexpr (Y_KIND == 0) { words[u] = __float_as_uint(v[u]); words[u + 1] = __float_as_uint(v[u + 1]); }
    else words[u / 2] = Y_KIND == 1 ? pack_bf16(v[u], v[u + 1]) : pack_half(v[u], v[u + 1]);
  }
  store_words((u8*)y + (u64)index * Y_BYTES, words);
}

__device__ __forceinline__ int team_thread() { return threadIdx.x % TEAM_THREADS; }
__device__ __forceinline__ void sync_team() {
  if constexpr (TEAMS == 1) __syncthreads();
  else asm volatile("bar.sync %0, %1;" ::"r"((int)threadIdx.x / TEAM_THREADS + 1), "n"(TEAM_THREADS) : "memory");
}

// Blocks of one group count their arrivals at a chunk; `wait` returns once `count` have arrived.
__device__ __forceinline__ void arrive(u32* counter) {
  sync_team();
  if (team_thread() == 0)
    asm volatile("fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ void wait(const u32* counter, u32 count) {
  if (team_thread() == 0) {
    u32 seen;
    do { asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory"); } while (seen < count);
  }
  sync_team();
}

#if CLUSTER
#define IN_CLUSTER __cluster_dims__(SPLIT, 1, 1)
static_assert(ONE_CHUNK && SPLIT > 1);

__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Messages between the blocks of a cluster, for one team. Message n goes to slot n % 2 of its receivers. A slot's barrier counts
// bytes: it completes when all `expected` have come. No slot is written before all its readers are done, because a block sends
// message n + 2 only after it has message n + 1 of all blocks, which their threads send after they have read message n.
struct Mailbox {
  u32 barriers;  // of the two slots, in shared memory
  u32 expected;  // bytes that come to a slot
  u32 n;         // the message that is sent or awaited next

  __device__ __forceinline__ void expect(int slot) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barriers + 8 * slot), "r"(expected) : "memory");
  }
  // By one thread, before sync_cluster.
  __device__ __forceinline__ void open() const {
    for (int slot = 0; slot < 2; ++slot) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * slot) : "memory");
      expect(slot);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // N words to `address` of this block's shared memory, in block `rank`.
  template <int N> __device__ __forceinline__ void send(int rank, u32 address, const u32 (&v)[N]) const {
    static_assert(N == 1 || N == 2 || N == 4);
    u32 target, barrier;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(target) : "r"(address), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(barriers + 8 * (n & 1)), "r"(rank));
    if constexpr (N == 1)
      asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                   ::"r"(target), "r"(v[0]), "r"(barrier) : "memory");
    else if constexpr (N == 2)
      asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1,%2}, [%3];"
                   ::"r"(target), "r"(v[0]), "r"(v[1]), "r"(barrier) : "memory");
    else
      asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];"
                   ::"r"(target), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(barrier) : "memory");
  }
  // Returns once message n has come from all blocks; returns its slot.
  __device__ __forceinline__ int receive() {
    const int slot = n & 1;
    u32 done;
    do {
      asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                   : "=r"(done) : "r"(barriers + 8 * slot), "r"(n >> 1 & 1) : "memory");
    } while (!done);
    if (team_thread() == 0) expect(slot);
    ++n;
    return slot;
  }
};
#else
#define IN_CLUSTER
#endif

// This lane's ldmatrix address of its warp's rows in a tile of `stride` columns, and of a tile pair in W.
__device__ __forceinline__ u32 a_lane_offset(int warp_row, int lane, int stride) {
  if constexpr (HALVES == 2) return 2 * ((warp_row * WARP_HEIGHT + lane % 16) * stride + lane / 16 * 8);
  else return 2 * ((warp_row * WARP_HEIGHT + lane % 8) * stride + lane / 16 * 8);  // rows 8 to 15 repeat 0 to 7
}

template <int A_STRIDE> __device__ __forceinline__ void load_a(u32 (&fa)[MT][4], u32 a, int k) {
#pragma unroll
  for (int m = 0; m < MT; ++m) ldmatrix4(fa[m], a + 2 * (m * 16 * A_STRIDE + k));
}

// B fragments of TILES tiles at column k: two words each.
template <int TILES, int B_STRIDE> __device__ __forceinline__ void load_b(u32 (&fb)[TILES][2], u32 b, int k) {
#pragma unroll
  for (int n = 0; n + 1 < TILES; n += 2) {
    u32 f[4];
    ldmatrix4(f, b + 2 * (n * 8 * B_STRIDE + k));
    fb[n][0] = f[0]; fb[n][1] = f[1]; fb[n + 1][0] = f[2]; fb[n + 1][1] = f[3];
  }
  if constexpr (TILES % 2) ldmatrix2(fb[TILES - 1][0], fb[TILES - 1][1], b + 2 * ((TILES - 1) * 8 * B_STRIDE + k));
}

// acc += A[rows, K] * B[K, tiles]; A is in shared memory, B there (at `b`) or in registers (`w`).
// Successive k go to SETS accumulators in turn, so that few tiles do not wait for each other's results.
template <int K, int TILES, int SETS, int A_STRIDE, int B_STRIDE, int W_STEPS>
__device__ __forceinline__ void multiply(float (&acc)[SETS][MT][TILES][4], u32 a, u32 b, u32 (&w)[W_STEPS][TILES][2]) {
#pragma unroll
  for (int k = 0; k < K; k += 16) {
    u32 fa[MT][4];
    load_a<A_STRIDE>(fa, a, k);
    if constexpr (!W_REGISTERS) load_b<TILES, B_STRIDE>(w[0], b, k);
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        const u32* fb = w[W_REGISTERS ? k / 16 % W_STEPS : 0][n];
        mma(acc[k / 16 % SETS][m][n], fa[m], fb[0], fb[1]);
      }
  }
}

template <int TILES, int SETS> __device__ __forceinline__ void clear(float (&acc)[SETS][MT][TILES][4]) {
#pragma unroll
  for (int s = 0; s < SETS; ++s)
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[s][m][n][i] = 0.0f;
}

// acc += A * B where A streams from global memory through STAGES buffers of KC columns, or at once where KC covers K.
// source: first row of the chunk, `row_stride` elements apart; rows at or beyond `rows` and columns beyond K are zeros.
template <int K, int TILES, int SETS, int B_STRIDE, int W_STEPS>
__device__ __forceinline__ void multiply_streamed(float (&acc)[SETS][MT][TILES][4], const u16* source, i64 row_stride, int rows,
                                                  u16* ring, u32 a_lane, u32 b, u32 (&w)[W_STEPS][TILES][2]) {
  constexpr int STRIDE = KC + 8, PIECES = KC / 8, BUFFER = R * STRIDE, COUNT = (K + KC - 1) / KC;
  static_assert(COUNT == 1 || (STAGES > 1 && !W_REGISTERS));
  auto fetch = [&](int piece) {
    if (piece < COUNT) {
      u16* target = ring + (piece % STAGES) * BUFFER;
      for (int i = team_thread(); i < R * PIECES; i += TEAM_THREADS) {
        int row = i / PIECES, k = piece * KC + (i % PIECES) * 8;
        bool inside = row < rows && k < K;
        copy_async(shared_address(target + row * STRIDE + (i % PIECES) * 8), source + (inside ? row * row_stride + k : 0),
                   inside ? 16 : 0);
      }
    }
    copy_commit();
  };
  if constexpr (COUNT == 1) {
    fetch(0);
    copy_wait<0>();
    sync_team();
    multiply<KC, TILES, SETS, STRIDE, B_STRIDE>(acc, shared_address(ring) + a_lane, b, w);
  } else {
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) fetch(s);
#pragma unroll 1
    for (int piece = 0; piece < COUNT; ++piece) {
      copy_wait<STAGES - 2>();
      sync_team();
      fetch(piece + STAGES - 1);
      multiply<KC, TILES, SETS, STRIDE, B_STRIDE>(acc, shared_address(ring + (piece % STAGES) * BUFFER) + a_lane,
                                                  b + 2 * piece * KC, w);
    }
  }
}
