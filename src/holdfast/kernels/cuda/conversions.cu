// Conversions to fp16 before the recurrence and its matrix products, scaling and sums after them; each stage is one
// launch. Constants from the host: X_KIND, W_KIND (0 fp32, 1 bf16, 2 fp16), GATES, HIDDEN, INPUTS, FIRST_H
// (first h column of the packed operand [x | h]), WIDTH (its row length).

__device__ __forceinline__ i64 thread_index() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ i64 thread_count() { return (i64)gridDim.x * blockDim.x; }

// Weights to fp16, 8 elements at a time (their number is a multiple of 8, as HIDDEN is).
__device__ __forceinline__ void convert_weights(const void* w, u16* target, i64 count) {
  for (i64 i = thread_index() * 8; i < count; i += thread_count() * 8) {
    float v[8];
    read8<W_KIND>(v, w, i);
    write8<2>(target, i, v);
  }
}

struct ForwardArguments {
  const void* x;       // [rows, INPUTS]
  u16* packed;         // [rows, WIDTH]; the first INPUTS columns are written
  const void* w_ih;    // [GATES*H, INPUTS]
  u16* w_ih_half;
  const void* w_hh;    // [GATES*H, H]
  u16* w_hh_half;
  u32* arrivals;       // [chunks], becomes zeros
  i64 rows;
  int chunks;
};
extern "C" __global__ void __launch_bounds__(256) prepare_forward(const ForwardArguments p) {
  constexpr bool WIDE = INPUTS % 8 == 0;
  if constexpr (WIDE) {
    for (i64 i = thread_index(); i < p.rows * (INPUTS / 8); i += thread_count()) {
      const i64 row = i / (INPUTS / 8), column = i % (INPUTS / 8) * 8;
      float v[8];
      read8<X_KIND>(v, p.x, i * 8);
#pragma unroll
      for (int k = 0; k < 8; ++k) v[k] = saturate_half(v[k]);
      write8<2>(p.packed, row * WIDTH + column, v);
    }
  } else {
    for (i64 i = thread_index(); i < p.rows * INPUTS; i += thread_count())
      p.packed[i / INPUTS * WIDTH + i % INPUTS] = to_half(saturate_half(read<X_KIND>(p.x, i)));
  }
  convert_weights(p.w_ih, p.w_ih_half, (i64)GATES * HIDDEN * INPUTS);
  convert_weights(p.w_hh, p.w_hh_half, (i64)GATES * HIDDEN * HIDDEN);
  for (i64 i = thread_index(); i < p.chunks; i += thread_count()) p.arrivals[i] = 0;
}

template <int KIND> __device__ __forceinline__ float largest_of(const void* p, i64 count) {
  float largest = 0.0f;
  if (p)
    for (i64 i = thread_index() * 8; i < count; i += thread_count() * 8) {
      float v[8];
      read8<KIND>(v, p, i);
#pragma unroll
      for (int k = 0; k < 8; ++k) largest = fmaxf(largest, fabsf(v[k]));
    }
  return largest;
}

struct BackwardArguments {
  const void* dy;      // [rows, H] or null
  const float* dh_n;   // [B, H] or null
  const float* dc_n;
  float* maxima;       // [blocks of this launch]
  const void* w_ih;    // [GATES*H, INPUTS]
  u16* w_ih_half;      // the rows in the order of d_gates: for the GRU n, r, z
  const void* w_hh;    // [GATES*H, H]
  u16* w_t;            // [H, GATES*H]
  u32* arrivals;       // [chunks], becomes zeros
  i64 rows, batch;
  int chunks;
};
extern "C" __global__ void __launch_bounds__(256) prepare_backward(const BackwardArguments p) {
  __shared__ float warp_maxima[8];
  float largest = largest_of<X_KIND>(p.dy, p.rows * HIDDEN);
  largest = fmaxf(largest, fmaxf(largest_of<0>(p.dh_n, p.batch * HIDDEN), largest_of<0>(p.dc_n, p.batch * HIDDEN)));
  for (int step = 16; step; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, step));
  if (threadIdx.x % 32 == 0) warp_maxima[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < 8; ++i) largest = fmaxf(largest, warp_maxima[i]);
    p.maxima[blockIdx.x] = largest;
  }
  constexpr i64 TAIL = GATES == 3 ? (i64)2 * HIDDEN * INPUTS : 0, ALL = (i64)GATES * HIDDEN * INPUTS;
  for (i64 i = thread_index() * 8; i < ALL; i += thread_count() * 8) {
    float v[8];
    read8<W_KIND>(v, p.w_ih, (i + TAIL) % ALL);
    write8<2>(p.w_ih_half, i, v);
  }
  constexpr int K = GATES * HIDDEN;
  for (i64 i = thread_index(); i < (i64)HIDDEN * (K / 8); i += thread_count()) {
    const int unit = i % HIDDEN, k = i / HIDDEN * 8;
    float v[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) v[n] = read<W_KIND>(p.w_hh, (i64)(k + n) * HIDDEN + unit);
    write8<2>(p.w_t, (i64)unit * K + k, v);
  }
  for (i64 i = thread_index(); i < p.chunks; i += thread_count()) p.arrivals[i] = 0;
}

struct FinishArguments {
  const float* maxima;
  const u16* dx_half;         // [rows, INPUTS] scaled, or null: a product of fp16 can write fp32 and fp16, but not bf16
  void* dx;                   // [rows, INPUTS]
  const float* dw;            // [4H, WIDTH] scaled
  void* dw_ih;                // [GATES*H, INPUTS]
  void* dw_hh;                // [GATES*H, H]
  const float* bias_sums;     // [partials, 4H]
  void* db_ih;                // [GATES*H]
  void* db_hh;
  const float* reset_sums_h;  // [partials, H] or null
  const float* reset_sums_c;
  float* d_reset_h;           // [H]
  float* d_reset_c;
  i64 rows;
  int partials, maxima_count;
};
// Row of d_gates that holds row `g` of the weights: the GRU's order is n, r, z, r * n.
__device__ __forceinline__ int input_row(int g) { return GATES == 4 ? g : g < 2 * HIDDEN ? g + HIDDEN : g - 2 * HIDDEN; }
__device__ __forceinline__ int hidden_row(int g) { return GATES == 4 ? g : g + HIDDEN; }

// Sums of 32 columns of a [partials, width] matrix by one block of 256 threads; `give(column, sum)` once per column.
template <class Give> __device__ void column_sums(const float* sums, int partials, int width, int first_column, Give give) {
  __shared__ float parts[8][32];
  const int lane = threadIdx.x % 32, part = threadIdx.x / 32, column = first_column + lane;
  float sum = 0.0f;
  if (column < width)
    for (int i = part; i < partials; i += 8) sum += sums[(i64)i * width + column];
  parts[part][lane] = sum;
  __syncthreads();
  if (part == 0 && column < width) {
    for (int i = 1; i < 8; ++i) sum += parts[i][lane];
    give(column, sum);
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(256) finish_backward(const FinishArguments p) {
  const float inverse = gradient_scale(p.maxima, p.maxima_count).inverse;
  for (int first = blockIdx.x * 32; first < 4 * HIDDEN; first += gridDim.x * 32)
    column_sums(p.bias_sums, p.partials, 4 * HIDDEN, first, [&](int column, float sum) {
      const bool meets_x = GATES == 4 || column < 3 * HIDDEN, meets_h = GATES == 4 || column >= HIDDEN;
      if (meets_x) write<W_KIND>(p.db_ih, GATES == 4 ? column : (column + 2 * HIDDEN) % (3 * HIDDEN), sum);
      if (meets_h) write<W_KIND>(p.db_hh, GATES == 4 ? column : column - HIDDEN, sum);
    });
  if (p.reset_sums_h)
    for (int first = blockIdx.x * 32; first < HIDDEN; first += gridDim.x * 32) {
      column_sums(p.reset_sums_h, p.partials, HIDDEN, first, [&](int column, float sum) { p.d_reset_h[column] = sum; });
      if (GATES == 4)
        column_sums(p.reset_sums_c, p.partials, HIDDEN, first, [&](int column, float sum) { p.d_reset_c[column] = sum; });
    }
  if (p.dx_half)
    for (i64 i = thread_index() * 8; i < p.rows * INPUTS; i += thread_count() * 8) {
      if (i + 8 <= p.rows * INPUTS) {
        float v[8];
        read8<2>(v, p.dx_half, i);
#pragma unroll
        for (int k = 0; k < 8; ++k) v[k] *= inverse;
        write8<X_KIND>(p.dx, i, v);
      } else {
        for (i64 k = i; k < p.rows * INPUTS; ++k) write<X_KIND>(p.dx, k, read<2>(p.dx_half, k) * inverse);
      }
    }
  for (i64 i = thread_index(); i < (i64)GATES * HIDDEN * INPUTS; i += thread_count())
    write<W_KIND>(p.dw_ih, i, p.dw[(i64)input_row(i / INPUTS) * WIDTH + i % INPUTS] * inverse);
  for (i64 i = thread_index(); i < (i64)GATES * HIDDEN * HIDDEN; i += thread_count())
    write<W_KIND>(p.dw_hh, i, p.dw[(i64)hidden_row(i / HIDDEN) * WIDTH + FIRST_H + i % HIDDEN] * inverse);
}
