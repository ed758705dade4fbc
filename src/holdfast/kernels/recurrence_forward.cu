// LSTM or GRU over a sequence, forward. See recurrence_common.cuh for the plan and docs/kernels.md for the reasons.
//
// Rows are r = t * B + b. gates [T*B, GATES*H] fp16 holds the input's pre-activations without bias; with SAVE the activated
// gates replace them. The state entering each step, resets applied, goes to h_in (fp16, `h_stride` apart; two slots
// of B rows when not SAVE) and saved [T*B, H]: c for the LSTM, W_hn h + b_hn for the GRU.
// All state is fp32 [B, H]: h0 and carry0 (c0; for the GRU h0 again) come in, h_n and carry (c_n; for the GRU h_n again, in a
// buffer of its own) go out. b_ih, b_hh [GATES*H] fp32 or null, resets [T*B] or null, fill_h, fill_c [H] fp32 or null.

constexpr int K = HIDDEN;
constexpr int KP = SPLIT == 1 ? (K + 15) / 16 * 16 : (K + KC - 1) / KC * KC;
constexpr int W_STRIDE = KP + 8;
constexpr int A_STRIDE = SPLIT == 1 ? KP + 8 : KC + 8;
constexpr int TILES = GATES * J;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
recurrence_forward(u16* gates, const u16* w_hh, const float* b_ih, const float* b_hh, const float* h0, const float* carry0,
                   float* h_n, float* carry, const u8* resets, const float* fill_h, const float* fill_c, void* y, u16* h_in,
                   u16* saved, u32* arrivals, int steps, int batch, int groups, int chunks, i64 h_stride) {
  extern __shared__ __align__(16) u16 memory[];
  u16* w = memory;                                        // [WARP_UNITS * TILES * 8 (+ 8 padding)][W_STRIDE]
  u16* a = w + (WARP_UNITS * TILES * 8 + 8) * W_STRIDE;   // h: [R][A_STRIDE], or the ring
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp / WARP_UNITS, warp_unit = warp % WARP_UNITS;
  const int group = blockIdx.x / SPLIT, first_unit = (blockIdx.x % SPLIT) * NH;
  const int unit = first_unit + warp_unit * WU + UT * (lane % 4);   // the first of this thread's UT units
  const bool unit_ok = unit < HIDDEN;
  const int lane_row = warp_row * 16 * MT + lane / 4;

  for (int i = threadIdx.x; i < WARP_UNITS * TILES * 8 * (KP / 8); i += THREADS) {
    int n = i / (KP / 8), k = i % (KP / 8) * 8;
    int column = n % 8, j = n / 8 % J, gate = n / 8 / J % GATES, block = n / 8 / J / GATES;
    int u = first_unit + block * WU + UT * (column / 2) + 2 * j + column % 2;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (u < HIDDEN && k < K) v = *(const uint4*)(w_hh + (i64)(gate * HIDDEN + u) * HIDDEN + k);
    *(uint4*)(w + n * W_STRIDE + k) = v;
  }
  if constexpr (SPLIT == 1)
    for (int i = threadIdx.x; i < R * A_STRIDE / 2; i += THREADS) ((u32*)a)[i] = 0;
  const u32 b_lane = shared_address(w + (warp_unit * TILES * 8 + lane % 8 + lane / 16 * 8) * W_STRIDE + lane / 8 % 2 * 8);
  const u32 a_lane = 2 * ((warp_row * 16 * MT + lane % 16) * A_STRIDE + lane / 16 * 8);

  float bias[GATES][UT], bias_hidden[UT], start_h[UT], start_c[UT];
#pragma unroll
  for (int u = 0; u < UT; ++u) {
#pragma unroll
    for (int gate = 0; gate < GATES; ++gate) {
      bias[gate][u] = unit_ok && b_ih ? b_ih[gate * HIDDEN + unit + u] : 0.0f;
      if (unit_ok && b_hh && !(GRU && gate == 2)) bias[gate][u] += b_hh[gate * HIDDEN + unit + u];
    }
    bias_hidden[u] = GRU && unit_ok && b_hh ? b_hh[2 * HIDDEN + unit + u] : 0.0f;
    start_h[u] = FILL && unit_ok && fill_h ? fill_h[unit + u] : 0.0f;
    start_c[u] = FILL && !GRU && unit_ok && fill_c ? fill_c[unit + u] : 0.0f;
  }
  __syncthreads();

  // The state that enters step 0.
  float kept[MT][2][UT];
  for (int chunk = group; chunk < chunks; chunk += groups) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int local = lane_row + m * 16 + half * 8, row = chunk * R + local;
        bool ok = row < batch && unit_ok;
        bool reset = RESETS && ok && resets[row];
        float h[UT];
#pragma unroll
        for (int u = 0; u < UT; ++u) {
          h[u] = ok ? (reset ? start_h[u] : h0[(i64)row * HIDDEN + unit + u]) : 0.0f;
          if constexpr (ONE_CHUNK) kept[m][half][u] = ok ? carry0[(i64)row * HIDDEN + unit + u] : 0.0f;
        }
        HalfRun run;
        to_half_run(run, h);
        if (ok && (SPLIT > 1 || SAVE)) store_words(h_in + row * h_stride + unit, run);
        if (SPLIT == 1 && ok)
#pragma unroll
          for (int i = 0; i < UT / 2; ++i) ((u32*)(a + local * A_STRIDE + unit))[i] = run[i];
      }
    if constexpr (SPLIT > 1) arrive(arrivals + chunk);
  }
  if constexpr (SPLIT == 1) __syncthreads();

  for (int t = 0; t < steps; ++t) {
    const i64 first = (i64)t * batch;
    for (int chunk = group; chunk < chunks; chunk += groups) {
      const int chunk_row = chunk * R;
      // Everything that does not depend on the other blocks is fetched before waiting for them.
      HalfRun x[MT][2][GATES];
      FloatRun state[MT][2];
      u8 reset_now[MT][2], reset_next[MT][2];
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int row = chunk_row + lane_row + m * 16 + half * 8;
          bool ok = row < batch && unit_ok;
#pragma unroll
          for (int gate = 0; gate < GATES; ++gate) {
            if (ok) load_words(x[m][half][gate], gates + (first + row) * (GATES * HIDDEN) + gate * HIDDEN + unit);
            else
#pragma unroll
              for (int i = 0; i < UT / 2; ++i) x[m][half][gate][i] = 0;
          }
          if constexpr (!ONE_CHUNK) {
            if (ok) load_words(state[m][half], (t ? carry : carry0) + (i64)row * HIDDEN + unit);
            else
#pragma unroll
              for (int u = 0; u < UT; ++u) state[m][half][u] = 0;
          }
          reset_now[m][half] = RESETS && ok ? resets[first + row] : 0;
          reset_next[m][half] = RESETS && ok && t + 1 < steps ? resets[first + batch + row] : 0;
        }
      if constexpr (SPLIT > 1) wait(arrivals + chunk, (u32)SPLIT * (t + 1));

      float acc_sets[1][MT][TILES][4];
      clear<TILES, 1>(acc_sets);
      auto& acc = acc_sets[0];
      if constexpr (SPLIT == 1) {
        multiply<KP, TILES, 1, A_STRIDE, W_STRIDE>(acc_sets, shared_address(a) + a_lane, b_lane);
        __syncthreads();
      } else {
        const i64 slot = SAVE ? first : (i64)(t & 1) * batch;
        multiply_streamed<K, TILES, 1, W_STRIDE>(acc_sets, h_in + (slot + chunk_row) * h_stride, h_stride, batch - chunk_row,
                                                 a, a_lane, b_lane);
      }

#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int local = lane_row + m * 16 + half * 8, row = chunk_row + local;
          const bool ok = row < batch && unit_ok;
          float out[GATES][UT], before[UT], after[UT], h[UT], extra[UT];
#pragma unroll
          for (int u = 0; u < UT; ++u) {
            const int j = u / 2, slot = half * 2 + u % 2;
            before[u] = ONE_CHUNK ? kept[m][half][u] : __uint_as_float(state[m][half][u]);
            if (RESETS && reset_now[m][half]) before[u] = GRU ? start_h[u] : start_c[u];
            float pre0 = half_at(x[m][half][0], u) + bias[0][u] + acc[m][j][slot];
            float pre1 = half_at(x[m][half][1], u) + bias[1][u] + acc[m][J + j][slot];
            float pre2 = half_at(x[m][half][2], u) + bias[2][u];
            if constexpr (GRU) {
              extra[u] = acc[m][2 * J + j][slot] + bias_hidden[u];
              float r = sigmoid(pre0), z = sigmoid(pre1), n = tanh_(pre2 + r * extra[u]);
              after[u] = n + z * (before[u] - n);
              h[u] = after[u];
              out[0][u] = r; out[1][u] = z; out[2][u] = n;
            } else {
              float pre3 = half_at(x[m][half][GATES - 1], u) + bias[GATES - 1][u] + acc[m][(GATES - 1) * J + j][slot];
              float i = sigmoid(pre0), f = sigmoid(pre1), g = tanh_(pre2 + acc[m][2 * J + j][slot]), o = sigmoid(pre3);
              after[u] = f * before[u] + i * g;
              h[u] = o * tanh_(after[u]);
              extra[u] = before[u];
              out[0][u] = i; out[1][u] = f; out[2][u] = g; out[GATES - 1][u] = o;
            }
          }
          if (ok) {
            // h first: the other blocks wait for it.
            if (t + 1 < steps) {
              float next[UT];
#pragma unroll
              for (int u = 0; u < UT; ++u) next[u] = RESETS && reset_next[m][half] ? start_h[u] : h[u];
              HalfRun run;
              to_half_run(run, next);
              if constexpr (SPLIT > 1 || SAVE) {
                const i64 slot = SAVE ? first + batch : (i64)((t + 1) & 1) * batch;
                store_words(h_in + (slot + row) * h_stride + unit, run);
              }
              if constexpr (SPLIT == 1)
#pragma unroll
                for (int i = 0; i < UT / 2; ++i) ((u32*)(a + local * A_STRIDE + unit))[i] = run[i];
            } else {
#pragma unroll
              for (int u = 0; u < UT; ++u) h_n[(i64)row * HIDDEN + unit + u] = h[u];
            }
            store_y(y, (first + row) * HIDDEN + unit, h);
            if constexpr (SAVE) {
              HalfRun run;
#pragma unroll
              for (int gate = 0; gate < GATES; ++gate) {
                to_half_run(run, out[gate]);
                store_words(gates + (first + row) * (GATES * HIDDEN) + gate * HIDDEN + unit, run);
              }
              to_half_run(run, extra);
              store_words(saved + (first + row) * HIDDEN + unit, run);
            }
            if (!ONE_CHUNK || t + 1 == steps) {
              FloatRun words;
#pragma unroll
              for (int u = 0; u < UT; ++u) words[u] = __float_as_uint(after[u]);
              store_words(carry + (i64)row * HIDDEN + unit, words);
            }
          }
          if constexpr (ONE_CHUNK)
#pragma unroll
            for (int u = 0; u < UT; ++u) kept[m][half][u] = after[u];
        }
      if constexpr (SPLIT > 1) { if (t + 1 < steps) arrive(arrivals + chunk); else __syncthreads(); }
      else __syncthreads();
    }
  }
}
