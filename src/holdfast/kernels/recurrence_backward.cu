// LSTM or GRU over a sequence, backward: from the last step to the first. See recurrence_common.cuh.
//
// gates, saved, h_in as the forward left them (h_in is read by the GRU only). w_t [H, GATES*H] fp16 is W_hh transposed.
// dy [T*B, H] or null; dh_n, dc_n [B, H] fp32 or null. d_gates [T*B, 4H] fp16, scaled by a power of two taken from amax_bits:
// LSTM i, f, g, o; GRU n, r, z, r*n (the first three meet the input, the last three the hidden state).
// dh0, carry [B, H] fp32: gradients of the start state, carry being dc0 for the LSTM. bias_sums [P, 4H] and fill_sums_h,
// fill_sums_c [P, H] fp32: partial sums, P = groups * WARP_ROWS * 8, not scaled.

constexpr int K = GATES * HIDDEN;
constexpr int K_FIRST = GRU ? HIDDEN : 0;
constexpr int KP = SPLIT == 1 ? (K + 15) / 16 * 16 : (K + KC - 1) / KC * KC;
constexpr int W_STRIDE = KP + 8;
constexpr int A_STRIDE = SPLIT == 1 ? KP + 8 : KC + 8;
constexpr int TILES = J;
constexpr int SETS = MT * TILES >= 4 ? 1 : 4 / (MT * TILES);

extern "C" __global__ void __launch_bounds__(THREADS, 1)
recurrence_backward(const u16* gates, const u16* saved, const u16* h_in, const u16* w_t, const u8* resets, const void* dy,
                    const float* dh_n, const float* dc_n, const u32* amax_bits, u16* d_gates, float* dh0, float* carry,
                    float* bias_sums, float* fill_sums_h, float* fill_sums_c, u32* arrivals, int steps, int batch,
                    int groups, int chunks, i64 h_stride) {
  extern __shared__ __align__(16) u16 memory[];
  u16* w = memory;                                        // [WARP_UNITS * TILES * 8 (+ 8 padding)][W_STRIDE]
  u16* a = w + (WARP_UNITS * TILES * 8 + 8) * W_STRIDE;   // gate gradients: [R][A_STRIDE], or the ring
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp / WARP_UNITS, warp_unit = warp % WARP_UNITS;
  const int group = blockIdx.x / SPLIT, first_unit = (blockIdx.x % SPLIT) * NH;
  const int unit = first_unit + warp_unit * WU + UT * (lane % 4);
  const bool unit_ok = unit < HIDDEN;
  const int lane_row = warp_row * 16 * MT + lane / 4;

  const u32 exponent = *amax_bits >> 23 & 0xFF;
  const bool usable = exponent > 0 && exponent < 250;
  const float scale = __uint_as_float((usable ? 250 - exponent : 127) << 23);
  const float inverse = __uint_as_float((usable ? exponent + 4 : 127) << 23);

  for (int i = threadIdx.x; i < WARP_UNITS * TILES * 8 * (KP / 8); i += THREADS) {
    int n = i / (KP / 8), k = i % (KP / 8) * 8;
    int column = n % 8, j = n / 8 % J, block = n / 8 / J;
    int u = first_unit + block * WU + UT * (column / 2) + 2 * j + column % 2;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (u < HIDDEN && k < K) v = *(const uint4*)(w_t + (i64)u * K + k);
    *(uint4*)(w + n * W_STRIDE + k) = v;
  }
  if constexpr (SPLIT == 1)
    for (int i = threadIdx.x; i < R * A_STRIDE / 2; i += THREADS) ((u32*)a)[i] = 0;
  const u32 b_lane = shared_address(w + (warp_unit * TILES * 8 + lane % 8 + lane / 16 * 8) * W_STRIDE + lane / 8 % 2 * 8);
  const u32 a_lane = 2 * ((warp_row * 16 * MT + lane % 16) * A_STRIDE + lane / 16 * 8);

  float kept[MT][2][UT], bias_sum[4][UT], fill_h[UT], fill_c[UT];
#pragma unroll
  for (int u = 0; u < UT; ++u) {
#pragma unroll
    for (int gate = 0; gate < 4; ++gate) bias_sum[gate][u] = 0.0f;
    fill_h[u] = fill_c[u] = 0.0f;
  }
  __syncthreads();

  for (int t = steps - 1; t >= -1; --t) {
    const i64 first = (i64)t * batch;
    for (int chunk = group; chunk < chunks; chunk += groups) {
      const int chunk_row = chunk * R;
      HalfRun x[MT][2][GATES], extra[MT][2], h_before[MT][2];
      u32 dy_run[MT][2][Y_WORDS];
      FloatRun state[MT][2];
      u8 reset_after[MT][2];
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = chunk_row + lane_row + m * 16 + half * 8;
          const bool ok = row < batch && unit_ok;
#pragma unroll
          for (int i = 0; i < Y_WORDS; ++i) dy_run[m][half][i] = 0;
#pragma unroll
          for (int i = 0; i < UT / 2; ++i) {
#pragma unroll
            for (int gate = 0; gate < GATES; ++gate) x[m][half][gate][i] = 0;
            extra[m][half][i] = h_before[m][half][i] = 0;
          }
#pragma unroll
          for (int u = 0; u < UT; ++u) state[m][half][u] = 0;
          if (ok && t >= 0) {
#pragma unroll
            for (int gate = 0; gate < GATES; ++gate)
              load_words(x[m][half][gate], gates + (first + row) * (GATES * HIDDEN) + gate * HIDDEN + unit);
            load_words(extra[m][half], saved + (first + row) * HIDDEN + unit);
            if constexpr (GRU) load_words(h_before[m][half], h_in + (first + row) * h_stride + unit);
            if (dy) load_words(dy_run[m][half], (const u8*)dy + ((first + row) * HIDDEN + unit) * Y_BYTES);
          }
          if (!ONE_CHUNK && ok && t + 1 < steps) load_words(state[m][half], carry + (i64)row * HIDDEN + unit);
          reset_after[m][half] = RESETS && ok && t + 1 < steps ? resets[first + batch + row] : 0;
        }

      float acc[SETS][MT][TILES][4];
      clear<TILES, SETS>(acc);
      if (t + 1 < steps) {
        if constexpr (SPLIT == 1) {
          multiply<KP, TILES, SETS, A_STRIDE, W_STRIDE>(acc, shared_address(a) + a_lane, b_lane);
        } else {
          wait(arrivals + chunk, (u32)SPLIT * (steps - 1 - t));
          multiply_streamed<K, TILES, SETS, W_STRIDE>(acc, d_gates + (first + batch + chunk_row) * (4 * HIDDEN) + K_FIRST,
                                                4 * HIDDEN, batch - chunk_row, a, a_lane, b_lane);
        }
      }
      if constexpr (SPLIT == 1) __syncthreads();

#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int local = lane_row + m * 16 + half * 8, row = chunk_row + local;
          const bool ok = row < batch && unit_ok;
          float out[4][UT], dh[UT], after[UT];
#pragma unroll
          for (int u = 0; u < UT; ++u) {
            float arriving = 0.0f, dc = 0.0f;
#pragma unroll
            for (int set = 0; set < SETS; ++set) arriving += acc[set][m][u / 2][half * 2 + u % 2];
            if (t + 1 == steps) {
              if (ok && dh_n) arriving = dh_n[(i64)row * HIDDEN + unit + u] * scale;
              if (!GRU && ok && dc_n) dc = dc_n[(i64)row * HIDDEN + unit + u] * scale;
            } else {
              dc = ONE_CHUNK ? kept[m][half][u] : __uint_as_float(state[m][half][u]);
              if constexpr (GRU) { arriving += dc; dc = 0.0f; }
              if (RESETS && reset_after[m][half]) {
                if constexpr (FILL) { fill_h[u] += arriving; fill_c[u] += dc; }
                arriving = dc = 0.0f;
              }
            }
            dh[u] = arriving + y_at(dy_run[m][half], u) * scale;
            if constexpr (GRU) {
              const float r = half_at(x[m][half][0], u), z = half_at(x[m][half][1], u), n = half_at(x[m][half][2], u);
              const float dn = dh[u] * (1.0f - z) * (1.0f - n * n);
              out[0][u] = dn;
              out[1][u] = dn * half_at(extra[m][half], u) * r * (1.0f - r);
              out[2][u] = dh[u] * (half_at(h_before[m][half], u) - n) * z * (1.0f - z);
              out[3][u] = dn * r;
              after[u] = dh[u] * z;
            } else {
              const float i = half_at(x[m][half][0], u), f = half_at(x[m][half][1], u), g = half_at(x[m][half][2], u);
              const float o = half_at(x[m][half][GATES - 1], u), before = half_at(extra[m][half], u);
              const float squashed = tanh_(f * before + i * g);
              if (t >= 0) dc += dh[u] * o * (1.0f - squashed * squashed);
              out[0][u] = dc * g * i * (1.0f - i);
              out[1][u] = dc * before * f * (1.0f - f);
              out[2][u] = dc * i * (1.0f - g * g);
              out[3][u] = dh[u] * squashed * o * (1.0f - o);
              after[u] = t >= 0 ? dc * f : dc;
            }
          }
          if (ok && t >= 0) {
#pragma unroll
            for (int gate = 0; gate < 4; ++gate) {
              HalfRun run;
              to_half_run(run, out[gate]);
              store_words(d_gates + (first + row) * (4 * HIDDEN) + gate * HIDDEN + unit, run);
              if (SPLIT == 1 && (!GRU || gate > 0))
#pragma unroll
                for (int i = 0; i < UT / 2; ++i)
                  ((u32*)(a + local * A_STRIDE + (gate - (GRU ? 1 : 0)) * HIDDEN + unit))[i] = run[i];
#pragma unroll
              for (int u = 0; u < UT; ++u) bias_sum[gate][u] += out[gate][u];
            }
            if constexpr (!ONE_CHUNK) {
              FloatRun words;
#pragma unroll
              for (int u = 0; u < UT; ++u) words[u] = __float_as_uint(after[u]);
              store_words(carry + (i64)row * HIDDEN + unit, words);
            }
          }
          if (ok && t < 0)
#pragma unroll
            for (int u = 0; u < UT; ++u) {
              dh0[(i64)row * HIDDEN + unit + u] = dh[u] * inverse;
              if constexpr (!GRU) carry[(i64)row * HIDDEN + unit + u] = after[u] * inverse;
            }
          if constexpr (ONE_CHUNK)
#pragma unroll
            for (int u = 0; u < UT; ++u) kept[m][half][u] = after[u];
        }
      if constexpr (SPLIT > 1) { if (t >= 0) arrive(arrivals + chunk); else __syncthreads(); }
      else __syncthreads();
    }
  }

  if (unit_ok) {
    const i64 partial = (group * WARP_ROWS + warp_row) * 8 + lane / 4;
#pragma unroll
    for (int u = 0; u < UT; ++u) {
#pragma unroll
      for (int gate = 0; gate < 4; ++gate)
        bias_sums[partial * (4 * HIDDEN) + gate * HIDDEN + unit + u] = bias_sum[gate][u] * inverse;
      if constexpr (FILL) {
        fill_sums_h[partial * HIDDEN + unit + u] = fill_h[u] * inverse;
        if constexpr (!GRU) fill_sums_c[partial * HIDDEN + unit + u] = fill_c[u] * inverse;
      }
    }
  }
}
