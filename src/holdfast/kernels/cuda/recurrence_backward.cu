// LSTM or GRU over a sequence, backward: from the last step to the first. See recurrence_common.cuh.

struct Arguments {
  const u16* gates;      // [T*B, GATES*H], saved [T*B, H] and h_in as the forward wrote them; only the GRU reads h_in
  const u16* saved;
  const u16* h_in;
  const u16* w_t;        // [H, GATES*H] fp16: W_hh transposed
  const u8* resets;      // [T*B]
  const void* dy;        // [T*B, H] or null
  const float* dh_n;     // [B, H] or null
  const float* dc_n;
  float* maxima;         // see gradient_scale.cuh; two more floats become the scale's inverse and 0
  u16* d_gates;          // [T*B, 4H] fp16, scaled: LSTM i, f, g, o; GRU n, r, z, r * n (x meets the first three, h the last three)
  float* dh0;            // [B, H]
  float* carry;          // [B, H]: dc0; scratch for the GRU
  float* bias_sums;      // [groups * TEAMS * WARP_ROWS, 4H]: partial sums of d_gates, unscaled
  float* reset_sums_h;   // [the same, H]: partial sums of the reset values' gradients, unscaled
  float* reset_sums_c;
  u32* arrivals;         // [chunks], zeros; with SHARE > 1 [chunks, SPLIT / SHARE] more of them, then what blocks of a set exchange
  int h_stride, steps, batch, groups, chunks, maxima_count;
};

// With SHARE > 1, sets of SHARE neighboring blocks divide the columns of their product: a block multiplies its columns for the
// units of the whole set and sends each block its sums. So it reads 1 / SHARE of the gate gradients of its rows. The blocks of a
// cluster are such a set. There a block's columns are those of its own units, so it reads nothing and sends only sums.
constexpr bool IN_SHARED = SPLIT == 1 || CLUSTER;  // gate gradients stay in shared memory
constexpr int K_ALL = GATES * HIDDEN, GATE_COLUMNS = CLUSTER ? NH : HIDDEN;
constexpr int K = CLUSTER ? GATES * NH : K_ALL / SHARE;
constexpr int K_FIRST = GRU ? HIDDEN : 0;
static_assert(!CLUSTER || SHARE == SPLIT);
static_assert(SHARE == 1 || CLUSTER || (SPLIT % SHARE == 0 && HIDDEN % NH == 0 && K_ALL % (SHARE * KC) == 0 && !W_REGISTERS));
constexpr int KP = IN_SHARED ? (K + 15) / 16 * 16 : (K + KC - 1) / KC * KC;
constexpr int W_STRIDE = KP + 8;
constexpr int A_STRIDE = IN_SHARED ? KP + 8 : KC + 8;
constexpr int A_SIZE = (IN_SHARED ? 1 : STAGES) * R * A_STRIDE;
constexpr int TILES = J * SHARE;
constexpr int EXCHANGED = R * NH;  // sums that a block sends to another one, for a chunk
[[maybe_unused]] constexpr int MAIL_SIZE = CLUSTER ? 2 * (SHARE - 1) * EXCHANGED : 0;  // of a team, in floats
constexpr int SETS = MT * TILES >= 4 ? 1 : 4 / (MT * TILES);
constexpr int W_STEPS = W_REGISTERS ? KP / 16 : 1;

// In turn into two sets of registers where a team sees one chunk; see recurrence_forward.cu.
constexpr int PARITIES = ONE_CHUNK ? 2 : 1;
struct StepInputs {
  u8 reset_after[MT][HALVES];  // resets of the step that follows in time
  HalfRun gates[MT][HALVES][GATES], saved[MT][HALVES], h_before[MT][HALVES];
  u32 dy[MT][HALVES][Y_WORDS];
};

template <class F> __device__ __forceinline__ void each(F&& f) {
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
#pragma unroll
      for (int u = 0; u < UT; ++u) f(m, half, u);
}

typedef float Sums[SETS][MT][TILES][4];
__device__ __forceinline__ float sum_of_sets(const Sums& acc, int m, int tile, int i) {
  float sum = 0.0f;
#pragma unroll
  for (int s = 0; s < SETS; ++s) sum += acc[s][m][tile][i];
  return sum;
}

// Sends the sums of the other blocks' units, waits until `count` messages have come to this set at this chunk, and adds what this
// block was sent to its own. Messages of a step are read before the gate gradients that the next step's senders wait for.
__device__ __forceinline__ void exchange(float (&arrived)[MT][HALVES][UT], const Sums& acc, u32* arrivals, int chunks, int chunk,
                                         int set, int share, u32 count) {
  constexpr int BLOCK_SETS = SPLIT / SHARE;
  float* messages = (float*)(arrivals + (chunks * (1 + BLOCK_SETS) + 63) / 64 * 64) +
                    ((i64)chunk * SPLIT + set * SHARE) * (SHARE * EXCHANGED) + team_thread();
#pragma unroll
  for (int member = 0; member < SHARE; ++member)
    each([&](int m, int half, int u) {
      const float sum = sum_of_sets(acc, m, member * J + u / 2, half * 2 + u % 2);
      const int e = ((m * HALVES + half) * UT + u) * TEAM_THREADS;
      if (member == share) arrived[m][half][u] = sum;
      else asm volatile("st.global.cg.f32 [%0], %1;" ::"l"(messages + (member * SHARE + share) * EXCHANGED + e), "f"(sum) : "memory");
    });
  u32* counter = arrivals + chunks + chunk * BLOCK_SETS + set;
  arrive(counter);
  wait(counter, count);
#pragma unroll
  for (int other = 1; other < SHARE; ++other) {
    const int member = (share + other) % SHARE;
    each([&](int m, int half, int u) {
      const int e = ((m * HALVES + half) * UT + u) * TEAM_THREADS;
      float sum;
      asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(sum) : "l"(messages + (share * SHARE + member) * EXCHANGED + e) : "memory");
      arrived[m][half][u] += sum;
    });
  }
}

#if CLUSTER
// The same through shared memory: [2][SHARE - 1][MT][HALVES][TEAM_THREADS][UT] floats at `messages`.
__device__ __forceinline__ void exchange(float (&arrived)[MT][HALVES][UT], const Sums& acc, Mailbox& mail, float* messages, int share) {
  constexpr int WORDS = UT < 4 ? UT : 4;
  float* const sent = messages + (mail.n & 1) * (MAIL_SIZE / 2) + team_thread() * UT;
  auto at = [](int sender, int receiver, int m, int half) {
    return (sender - receiver - 1 + SHARE) % SHARE * EXCHANGED + (m * HALVES + half) * (TEAM_THREADS * UT);
  };
#pragma unroll
  for (int member = 0; member < SHARE; ++member)
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int half = 0; half < HALVES; ++half)
#pragma unroll
        for (int u = 0; u < UT; u += WORDS) {
          u32 words[WORDS];
#pragma unroll
          for (int i = 0; i < WORDS; ++i) {
            const float sum = sum_of_sets(acc, m, member * J + (u + i) / 2, half * 2 + i % 2);
            if (member == share) arrived[m][half][u + i] = sum;
            words[i] = __float_as_uint(sum);
          }
          if (member != share) mail.send(member, shared_address(sent + at(share, member, m, half) + u), words);
        }
  const float* const received = messages + mail.receive() * (MAIL_SIZE / 2) + team_thread() * UT;
#pragma unroll
  for (int other = 1; other < SHARE; ++other)
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int half = 0; half < HALVES; ++half)
#pragma unroll
        for (int u = 0; u < UT; ++u) arrived[m][half][u] += received[at(share + other, share, m, half) + u];
}
#endif

extern "C" __global__ void IN_CLUSTER __launch_bounds__(THREADS, 1) recurrence_backward(const Arguments p) {
  extern __shared__ __align__(16) u16 memory[];
  u16* w = memory;                                       // [WARP_UNITS * TILES * 8][W_STRIDE]
  const int team = threadIdx.x / TEAM_THREADS;
  u16* a = w + WARP_UNITS * TILES * 8 * W_STRIDE + team * A_SIZE;   // gate gradients: [R][A_STRIDE], or the ring
#if CLUSTER
  __shared__ u64 barriers[TEAMS][2];
  float* const messages = (float*)(w + WARP_UNITS * TILES * 8 * W_STRIDE + TEAMS * A_SIZE) + team * MAIL_SIZE;
  Mailbox mail = {shared_address(barriers[team]), 2 * MAIL_SIZE, 0};
  if (team_thread() == 0) mail.open();
#endif
  const int lane = threadIdx.x % 32, warp = team_thread() / 32;
  const int warp_row = warp / WARP_UNITS, warp_unit = warp % WARP_UNITS;
  const int group = blockIdx.x / SPLIT, first_unit = (blockIdx.x % SPLIT) * NH;
  const int share = blockIdx.x % SPLIT % SHARE, set = blockIdx.x % SPLIT / SHARE;
  const int unit = first_unit + warp_unit * WU + UT * (lane % 4);
  const bool unit_ok = unit < HIDDEN;
  const int lane_row = warp_row * WARP_HEIGHT + lane / 4;
  const int first_chunk = group + team * p.groups, next_chunk = TEAMS * p.groups;
  const int batch = p.batch, steps = p.steps;
  const Scale s = gradient_scale(p.maxima, p.maxima_count);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    p.maxima[p.maxima_count] = s.inverse;
    p.maxima[p.maxima_count + 1] = 0.0f;
  }

  for (int i = threadIdx.x; i < WARP_UNITS * TILES * 8 * (KP / 8); i += THREADS) {
    int n = i / (KP / 8), k = i % (KP / 8) * 8;
    int column = n % 8, j = n / 8 % J, member = n / 8 / J % SHARE, block = n / 8 / TILES;
    int u = (set * SHARE + member) * NH + block * WU + UT * (column / 2) + 2 * j + column % 2;
    uint4 v = make_uint4(0, 0, 0, 0);
    const int own = CLUSTER ? k / NH * HIDDEN + first_unit + k % NH : share * K + k;
    if (u < HIDDEN && k < K && (!CLUSTER || first_unit + k % NH < HIDDEN)) v = *(const uint4*)(p.w_t + (i64)u * K_ALL + own);
    *(uint4*)(w + n * W_STRIDE + k) = v;
  }
  if constexpr (IN_SHARED)
    for (int i = team_thread(); i < R * A_STRIDE / 2; i += TEAM_THREADS) ((u32*)a)[i] = 0;
  const u32 b = shared_address(w + (warp_unit * TILES * 8 + lane % 8 + lane / 16 * 8) * W_STRIDE + lane / 8 % 2 * 8);
  const u32 a_lane = a_lane_offset(warp_row, lane, A_STRIDE);

  float kept[MT][HALVES][UT], bias_sum[4][UT], reset_sum_h[UT], reset_sum_c[UT];
#pragma unroll
  for (int u = 0; u < UT; ++u) {
#pragma unroll
    for (int gate = 0; gate < 4; ++gate) bias_sum[gate][u] = 0.0f;
    reset_sum_h[u] = reset_sum_c[u] = 0.0f;
  }
#if CLUSTER
  sync_cluster();
#else
  __syncthreads();
#endif
  u32 w_registers[W_STEPS][TILES][2];
  if constexpr (W_REGISTERS)
#pragma unroll
    for (int k = 0; k < W_STEPS; ++k) load_b<TILES, W_STRIDE>(w_registers[k], b, k * 16);

  // Addresses are a pointer to the step, the same for all threads, plus 32-bit offsets that do not change from step to step.
  auto load_step = [&](StepInputs& in, int t, int chunk_row) {
    const i64 first = (i64)t * batch;
    const u16 *gates_now = p.gates + first * (GATES * HIDDEN), *saved_now = p.saved + first * HIDDEN;
    const u16* h_now = p.h_in + first * p.h_stride;
    const u8 *dy_now = (const u8*)p.dy + first * HIDDEN * Y_BYTES, *resets_after = p.resets + first + batch;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        const int row = chunk_row + lane_row + m * 16 + half * 8;
        const u32 at = row * HIDDEN + unit;
#pragma unroll
        for (int i = 0; i < Y_WORDS; ++i) in.dy[m][half][i] = 0;
#pragma unroll
        for (int i = 0; i < UT / 2; ++i) {
#pragma unroll
          for (int gate = 0; gate < GATES; ++gate) in.gates[m][half][gate][i] = 0;
          in.saved[m][half][i] = in.h_before[m][half][i] = 0;
        }
        in.reset_after[m][half] =
            RESETS && row < batch && unit_ok && t >= -1 && t + 1 < steps ? resets_after[(u32)row] : 0;
        if (row < batch && unit_ok && t >= 0) {
#pragma unroll
          for (int gate = 0; gate < GATES; ++gate)
            load_words(in.gates[m][half][gate], gates_now + (u32)(row * (GATES * HIDDEN) + unit) + gate * HIDDEN);
          load_words(in.saved[m][half], saved_now + at);
          if constexpr (GRU) load_words(in.h_before[m][half], h_now + (u32)(row * p.h_stride + unit));
          if (p.dy) load_words(in.dy[m][half], dy_now + (u64)at * Y_BYTES);
        }
      }
  };
  StepInputs inputs[PARITIES];
  if (ONE_CHUNK && first_chunk < p.chunks) load_step(inputs[0], steps - 1, first_chunk * R);

  for (int t0 = steps - 1; t0 >= -1; t0 -= PARITIES)
#pragma unroll
  for (int parity = 0; parity < PARITIES; ++parity) {
    const int t = t0 - parity;
    if (t < -1) break;
    const i64 first = (i64)t * batch;
    u16* const d_gates_now = p.d_gates + first * (4 * HIDDEN);
    StepInputs& in = inputs[parity];
    for (int chunk = first_chunk; chunk < p.chunks; chunk += next_chunk) {
      const int chunk_row = chunk * R;
      load_step(inputs[PARITIES - 1 - parity], t - (PARITIES - 1), chunk_row);
      FloatRun state[MT][HALVES];
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
          const int row = chunk_row + lane_row + m * 16 + half * 8;
          const bool ok = row < batch && unit_ok && t + 1 < steps;
#pragma unroll
          for (int u = 0; u < UT; ++u) state[m][half][u] = 0;
          if (!ONE_CHUNK && ok) load_words(state[m][half], p.carry + (i64)row * HIDDEN + unit);
        }

      float acc[SETS][MT][TILES][4];
      clear<TILES, SETS>(acc);
      if (t + 1 < steps) {
        if constexpr (IN_SHARED) {
          multiply<KP, TILES, SETS, A_STRIDE, W_STRIDE>(acc, shared_address(a) + a_lane, b, w_registers);
        } else {
          wait(p.arrivals + chunk, (u32)SPLIT * (steps - 1 - t));
          multiply_streamed<K, TILES, SETS, W_STRIDE>(acc, p.d_gates + (first + batch + chunk_row) * (4 * HIDDEN) + K_FIRST + share * K,
                                                      4 * HIDDEN, batch - chunk_row, a, a_lane, b, w_registers);
        }
      }
      if constexpr (IN_SHARED) sync_team();
      float arrived[MT][HALVES][UT];
      if constexpr (SHARE > 1) {
#if CLUSTER
        if (t + 1 < steps) exchange(arrived, acc, mail, messages, share);
#else
        if (t + 1 < steps) exchange(arrived, acc, p.arrivals, p.chunks, chunk, set, share, (u32)SHARE * (steps - 1 - t));
#endif
      } else {
        each([&](int m, int half, int u) { arrived[m][half][u] = sum_of_sets(acc, m, u / 2, half * 2 + u % 2); });
      }

#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
          const int local = lane_row + m * 16 + half * 8, row = chunk_row + local;
          const bool ok = row < batch && unit_ok;
          float out[4][UT], dh[UT], after[UT];
#pragma unroll
          for (int u = 0; u < UT; ++u) {
            float arriving = arrived[m][half][u], dc = 0.0f;
            if (t + 1 == steps) {
              arriving = 0.0f;
              if (ok && p.dh_n) arriving = p.dh_n[(i64)row * HIDDEN + unit + u] * s.scale;
              if (!GRU && ok && p.dc_n) dc = p.dc_n[(i64)row * HIDDEN + unit + u] * s.scale;
            } else {
              dc = ONE_CHUNK ? kept[m][half][u] : __uint_as_float(state[m][half][u]);
              if constexpr (GRU) { arriving += dc; dc = 0.0f; }
              if (RESETS && in.reset_after[m][half]) {
                if constexpr (RESET_VALUES) { reset_sum_h[u] += arriving; reset_sum_c[u] += dc; }
                arriving = dc = 0.0f;
              }
            }
            dh[u] = arriving + y_at(in.dy[m][half], u) * s.scale;
            const float v0 = half_at(in.gates[m][half][0], u), v1 = half_at(in.gates[m][half][1], u);
            const float v2 = half_at(in.gates[m][half][2], u), v3 = half_at(in.gates[m][half][GATES - 1], u);
            const float saved = half_at(in.saved[m][half], u);
            if constexpr (GRU) {  // r, z, n; saved is W_hn h + b_hn
              const float dn = dh[u] * (1.0f - v1) * (1.0f - v2 * v2);
              out[0][u] = dn;
              out[1][u] = dn * saved * v0 * (1.0f - v0);
              out[2][u] = dh[u] * (half_at(in.h_before[m][half], u) - v2) * v1 * (1.0f - v1);
              out[3][u] = dn * v0;
              after[u] = dh[u] * v1;
            } else {  // i, f, g, o; saved is c before the step
              const float squashed = tanh_(v1 * saved + v0 * v2);
              if (t >= 0) dc += dh[u] * v3 * (1.0f - squashed * squashed);
              out[0][u] = dc * v2 * v0 * (1.0f - v0);
              out[1][u] = dc * saved * v1 * (1.0f - v1);
              out[2][u] = dc * v0 * (1.0f - v2 * v2);
              out[3][u] = dh[u] * squashed * v3 * (1.0f - v3);
              after[u] = t >= 0 ? dc * v1 : dc;
            }
          }
          if (ok && t >= 0) {
#pragma unroll
            for (int gate = 0; gate < 4; ++gate) {
              HalfRun run;
              to_half_run(run, out[gate]);
              store_words(d_gates_now + (u32)(row * (4 * HIDDEN) + unit) + gate * HIDDEN, run);
              if (IN_SHARED && (!GRU || gate > 0))
#pragma unroll
                for (int i = 0; i < UT / 2; ++i)
                  ((u32*)(a + local * A_STRIDE + (gate - (GRU ? 1 : 0)) * GATE_COLUMNS + unit - (CLUSTER ? first_unit : 0)))[i] = run[i];
#pragma unroll
              for (int u = 0; u < UT; ++u) bias_sum[gate][u] += out[gate][u];
            }
            if constexpr (!ONE_CHUNK) {
              FloatRun words;
#pragma unroll
              for (int u = 0; u < UT; ++u) words[u] = __float_as_uint(after[u]);
              store_words(p.carry + (i64)row * HIDDEN + unit, words);
            }
          }
          if (ok && t < 0)
#pragma unroll
            for (int u = 0; u < UT; ++u) {
              p.dh0[(i64)row * HIDDEN + unit + u] = dh[u] * s.inverse;
              if constexpr (!GRU) p.carry[(i64)row * HIDDEN + unit + u] = after[u] * s.inverse;
            }
          if constexpr (ONE_CHUNK)
#pragma unroll
            for (int u = 0; u < UT; ++u) kept[m][half][u] = after[u];
        }
      if constexpr (IN_SHARED) sync_team();
      else if (t >= 0) arrive(p.arrivals + chunk);
      else sync_team();
    }
  }
#if CLUSTER
  sync_cluster();  // nobody leaves while others write into its memory
#endif

  // Lanes of equal lane % 4 hold the same units of different rows.
  auto over_rows = [&](float v) {
    for (int step = 4; step < 32; step *= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
    return v * s.inverse;
  };
  const i64 partial = (group * TEAMS + team) * WARP_ROWS + warp_row;
  const bool writes = unit_ok && lane < 4;
#pragma unroll
  for (int u = 0; u < UT; ++u) {
#pragma unroll
    for (int gate = 0; gate < 4; ++gate) {
      const float sum = over_rows(bias_sum[gate][u]);
      if (writes) p.bias_sums[partial * (4 * HIDDEN) + gate * HIDDEN + unit + u] = sum;
    }
    if constexpr (RESET_VALUES) {
      const float sum_h = over_rows(reset_sum_h[u]), sum_c = over_rows(reset_sum_c[u]);
      if (writes) p.reset_sums_h[partial * HIDDEN + unit + u] = sum_h;
      if (writes && !GRU) p.reset_sums_c[partial * HIDDEN + unit + u] = sum_c;
    }
  }
}
