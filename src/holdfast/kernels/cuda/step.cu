// One step of an LSTM or GRU, without gradients: reset, both products, gates and new state in one launch.
//
// A block computes R rows x NH units of all gates. Inputs, state and weights come in whatever type they have and become
// fp16 on the way to shared memory. The input's part of the pre-activations is rounded to fp16 as it is in a whole sequence,
// so that a step and a sequence agree. Further constants from the host: INPUTS, X_KIND, S_KIND (state), W_KIND.

struct Arguments {
  const void* x;         // [B, INPUTS]
  const void* h;         // [B, H]
  const void* c;         // [B, H]; null for the GRU
  const u8* resets;      // [B]
  const float* fill_h;   // [H] or null
  const float* fill_c;
  const void* w_ih;      // [GATES*H, INPUTS]
  const void* w_hh;      // [GATES*H, H]
  const void* b_ih;      // [GATES*H] or null
  const void* b_hh;
  void* h_out;           // [B, H]
  void* c_out;
  int batch, row_tiles;
};

constexpr int TILES = GATES * J;
constexpr int DEPTH = 64, STRIDE = DEPTH + 8, GROUPS = DEPTH / 8;  // columns handled at a time; groups of 8 of them
constexpr int X_PIECES = (INPUTS + DEPTH - 1) / DEPTH, H_PIECES = (HIDDEN + DEPTH - 1) / DEPTH;
constexpr int A_SHARE = (R * GROUPS + THREADS - 1) / THREADS, W_SHARE = (GATES * NH * GROUPS + THREADS - 1) / THREADS;

// 8 elements of a row of WIDTH from column k on; zeros beyond its end.
template <int KIND, int WIDTH> __device__ __forceinline__ void read_group(float (&v)[8], const void* p, i64 row, int k) {
  if (WIDTH % 8 == 0 && k < WIDTH) read8<KIND>(v, p, row * WIDTH + k);
  else
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = k + i < WIDTH ? read<KIND>(p, row * WIDTH + k + i) : 0.0f;
}

extern "C" __global__ void __launch_bounds__(THREADS) recurrence_step(const Arguments p) {
  __shared__ __align__(16) u16 a[R * STRIDE];
  __shared__ __align__(16) u16 w[GATES * NH * STRIDE];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp / WARP_UNITS, warp_unit = warp % WARP_UNITS;
  const int first_row = blockIdx.x % p.row_tiles * R, first_unit = blockIdx.x / p.row_tiles * NH;
  const int unit = first_unit + warp_unit * WU + UT * (lane % 4);

  float from_a[A_SHARE][8], from_w[W_SHARE][8];
  auto fetch = [&](int piece) {
    const bool hidden = piece >= X_PIECES;
    const int first_k = (hidden ? piece - X_PIECES : piece) * DEPTH;
#pragma unroll
    for (int s = 0; s < A_SHARE; ++s) {
      const int i = threadIdx.x + s * THREADS, row = first_row + i / GROUPS, k = first_k + i % GROUPS * 8;
      if (i < R * GROUPS && row < p.batch) {
        if (!hidden) read_group<X_KIND, INPUTS>(from_a[s], p.x, row, k);
        else if (!RESETS || !p.resets[row]) read_group<S_KIND, HIDDEN>(from_a[s], p.h, row, k);
        else
#pragma unroll
          for (int e = 0; e < 8; ++e) from_a[s][e] = FILL && p.fill_h && k + e < HIDDEN ? p.fill_h[k + e] : 0.0f;
      } else
#pragma unroll
        for (int e = 0; e < 8; ++e) from_a[s][e] = 0.0f;
    }
#pragma unroll
    for (int s = 0; s < W_SHARE; ++s) {
      const int i = threadIdx.x + s * THREADS, n = i / GROUPS, k = first_k + i % GROUPS * 8;
      const int column = n % 8, j = n / 8 % J, gate = n / 8 / J % GATES, block = n / 8 / J / GATES;
      const int u = first_unit + block * WU + UT * (column / 2) + 2 * j + column % 2;
      if (i < GATES * NH * GROUPS && u < HIDDEN) {
        if (hidden) read_group<W_KIND, HIDDEN>(from_w[s], p.w_hh, gate * HIDDEN + u, k);
        else read_group<W_KIND, INPUTS>(from_w[s], p.w_ih, gate * HIDDEN + u, k);
      } else
#pragma unroll
        for (int e = 0; e < 8; ++e) from_w[s][e] = 0.0f;
    }
  };

  const u32 b_lane = shared_address(w + (warp_unit * TILES * 8 + lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 8);
  const u32 a_lane = shared_address(a) + a_lane_offset(warp_row, lane, STRIDE);
  float acc[1][MT][TILES][4], from_x[MT][TILES][4];
  u32 none[1][TILES][2];
  clear<TILES, 1>(acc);
  fetch(0);
#pragma unroll 1
  for (int piece = 0; piece < X_PIECES + H_PIECES; ++piece) {
    if (piece == X_PIECES) {
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) from_x[m][n][i] = half_low(pack_half(acc[0][m][n][i], 0.0f));
      clear<TILES, 1>(acc);
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < A_SHARE; ++s) {
      const int i = threadIdx.x + s * THREADS;
#pragma unroll
      for (int e = 0; e < 8; ++e) from_a[s][e] = saturate_half(from_a[s][e]);
      if (i < R * GROUPS) write8<2>(a, i / GROUPS * STRIDE + i % GROUPS * 8, from_a[s]);
    }
#pragma unroll
    for (int s = 0; s < W_SHARE; ++s) {
      const int i = threadIdx.x + s * THREADS;
      if (i < GATES * NH * GROUPS) write8<2>(w, i / GROUPS * STRIDE + i % GROUPS * 8, from_w[s]);
    }
    __syncthreads();
    if (piece + 1 < X_PIECES + H_PIECES) fetch(piece + 1);
    multiply<DEPTH, TILES, 1, STRIDE, STRIDE>(acc, a_lane, b_lane, none);
  }

#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      const int row = first_row + warp_row * WARP_HEIGHT + m * 16 + half * 8 + lane / 4;
      if (row >= p.batch || unit >= HIDDEN) continue;
      const bool reset = RESETS && p.resets[row];
#pragma unroll
      for (int u = 0; u < UT; ++u) {
        const int j = u / 2, slot = half * 2 + u % 2;
        const i64 at = (i64)row * HIDDEN + unit + u;
        float v[GATES], hidden_n = 0.0f;
#pragma unroll
        for (int gate = 0; gate < GATES; ++gate) {
          const int g = gate * HIDDEN + unit + u;
          const float bias_x = p.b_ih ? read<W_KIND>(p.b_ih, g) : 0.0f, bias_h = p.b_hh ? read<W_KIND>(p.b_hh, g) : 0.0f;
          if (GRU && gate == 2) {
            v[gate] = from_x[m][gate * J + j][slot] + bias_x;
            hidden_n = acc[0][m][gate * J + j][slot] + bias_h;
          } else {
            v[gate] = from_x[m][gate * J + j][slot] + (bias_x + bias_h) + acc[0][m][gate * J + j][slot];
          }
        }
        if constexpr (GRU) {
          float before = reset ? 0.0f : read<S_KIND>(p.h, at);
          if (FILL && reset && p.fill_h) before = p.fill_h[unit + u];
          v[0] *= MINUS_LOG2E;
          v[1] *= MINUS_LOG2E;
          sigmoid2(v[0], v[1]);
          const float n = tanh_(v[2] + v[0] * hidden_n);
          write<S_KIND>(p.h_out, at, n + v[1] * (before - n));
        } else {
          float before = reset ? 0.0f : read<S_KIND>(p.c, at);
          if (FILL && reset && p.fill_c) before = p.fill_c[unit + u];
          for (int gate = 0; gate < GATES; ++gate) v[gate] *= gate == 2 ? 2.0f * MINUS_LOG2E : MINUS_LOG2E;
          lstm_gates(v[0], v[1], v[2], v[GATES - 1]);
          const float c = v[1] * before + v[0] * v[2];
          write<S_KIND>(p.c_out, at, c);
          write<S_KIND>(p.h_out, at, v[GATES - 1] * tanh_(c));
        }
      }
    }
}
