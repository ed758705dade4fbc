// LSTM or GRU over a sequence, forward. See recurrence_common.cuh for the tiling and docs/performance/gpu.md for the reasons.

struct Arguments {
  u16* gates;            // [T*B, GATES*H] fp16: the input's pre-activations without bias; with SAVE the activated gates replace them
  const u16* w_hh;       // [GATES*H, H] fp16
  const void* b_ih;      // [GATES*H] or null, elements of W_KIND
  const void* b_hh;
  const float* h0;       // [B, H]
  const float* carry0;   // [B, H]: c0; for the GRU h0 again
  float* h_n;            // [B, H]
  float* carry;          // [B, H]: c_n; for the GRU it is h_n
  const u8* resets;      // [T*B]
  const float* reset_h;  // [H] or null
  const float* reset_c;
  void* y;               // [T*B, H]
  u16* h_in;             // the state each step starts from, resets applied: T*B rows, or two slots of B rows without SAVE
  u16* saved;            // [T*B, H] fp16: c before each step, resets applied; for the GRU W_hn h + b_hn
  u32* arrivals;         // [chunks], zeros
  int h_stride;          // elements from row to row of h_in
  int steps, batch, groups, chunks;
};

constexpr int K = HIDDEN;
constexpr bool IN_SHARED = SPLIT == 1 || CLUSTER;  // h is exchanged in shared memory
constexpr int KP = IN_SHARED ? (K + 15) / 16 * 16 : (K + KC - 1) / KC * KC;
constexpr int W_STRIDE = KP + 8;
constexpr int A_STRIDE = IN_SHARED ? KP + 8 : KC + 8;
constexpr int A_SIZE = (CLUSTER ? 2 : SPLIT == 1 ? 1 : STAGES) * R * A_STRIDE;
constexpr int TILES = GATES * J;
constexpr int W_STEPS = W_REGISTERS ? KP / 16 : 1;

// A team that sees one chunk fetches the inputs of a step while it works on the step before, in turn into two sets of
// registers (copying one to the other would wait for them to arrive).
constexpr int PARITIES = ONE_CHUNK ? 2 : 1;
struct StepInputs {
  HalfRun x[MT][HALVES][GATES];
  u8 reset_next[MT][HALVES];
};

// The gate functions take their arguments times a factor, which is folded into the sums that make them.
__device__ constexpr float gate_factor(int gate) { return gate != 2 ? MINUS_LOG2E : GRU ? 1.0f : 2.0f * MINUS_LOG2E; }

extern "C" __global__ void IN_CLUSTER __launch_bounds__(THREADS, 1) recurrence_forward(const Arguments p) {
  extern __shared__ __align__(16) u16 memory[];
  u16* w = memory;                                       // [WARP_UNITS * TILES * 8][W_STRIDE]
  const int team = threadIdx.x / TEAM_THREADS;
  u16* a = w + WARP_UNITS * TILES * 8 * W_STRIDE + team * A_SIZE;   // h: [R][A_STRIDE], two of them in a cluster, or the ring
  const int lane = threadIdx.x % 32, warp = team_thread() / 32;
  const int warp_row = warp / WARP_UNITS, warp_unit = warp % WARP_UNITS;
  const int group = blockIdx.x / SPLIT, first_unit = (blockIdx.x % SPLIT) * NH;
  const int unit = first_unit + warp_unit * WU + UT * (lane % 4);   // the first of this thread's UT units
  const bool unit_ok = unit < HIDDEN;
  const int lane_row = warp_row * WARP_HEIGHT + lane / 4;
  const int first_chunk = group + team * p.groups, next_chunk = TEAMS * p.groups;
  const int batch = p.batch, steps = p.steps;

  for (int i = threadIdx.x; i < WARP_UNITS * TILES * 8 * (KP / 8); i += THREADS) {
    int n = i / (KP / 8), k = i % (KP / 8) * 8;
    int column = n % 8, j = n / 8 % J, gate = n / 8 / J % GATES, block = n / 8 / J / GATES;
    int u = first_unit + block * WU + UT * (column / 2) + 2 * j + column % 2;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (u < HIDDEN && k < K) v = *(const uint4*)(p.w_hh + (i64)(gate * HIDDEN + u) * HIDDEN + k);
    *(uint4*)(w + n * W_STRIDE + k) = v;
  }
  if constexpr (IN_SHARED)
    for (int i = team_thread(); i < A_SIZE / 2; i += TEAM_THREADS) ((u32*)a)[i] = 0;
  const u32 b = shared_address(w + (warp_unit * TILES * 8 + lane % 8 + lane / 16 * 8) * W_STRIDE + lane / 8 % 2 * 8);
  const u32 a_lane = a_lane_offset(warp_row, lane, A_STRIDE);

  float bias[GATES][UT], bias_hidden[UT], start_h[UT], start_c[UT];
#pragma unroll
  for (int u = 0; u < UT; ++u) {
#pragma unroll
    for (int gate = 0; gate < GATES; ++gate) {
      bias[gate][u] = unit_ok && p.b_ih ? read<W_KIND>(p.b_ih, gate * HIDDEN + unit + u) : 0.0f;
      if (unit_ok && p.b_hh && !(GRU && gate == 2)) bias[gate][u] += read<W_KIND>(p.b_hh, gate * HIDDEN + unit + u);
      bias[gate][u] = __fmul_rn(bias[gate][u], gate_factor(gate));
    }
    bias_hidden[u] = GRU && unit_ok && p.b_hh ? read<W_KIND>(p.b_hh, 2 * HIDDEN + unit + u) : 0.0f;
    start_h[u] = RESET_VALUES && unit_ok && p.reset_h ? p.reset_h[unit + u] : 0.0f;
    start_c[u] = RESET_VALUES && !GRU && unit_ok && p.reset_c ? p.reset_c[unit + u] : 0.0f;
  }
#if CLUSTER
  __shared__ u64 barriers[TEAMS][2];
  Mailbox mail = {shared_address(barriers[team]), 2 * R * HIDDEN, 0};
  if (team_thread() == 0) mail.open();
  sync_cluster();
  auto send_h = [&](int local, const HalfRun& run) {  // to all blocks, this one included
    const u32 address = shared_address(a + ((mail.n & 1) * R + local) * A_STRIDE + unit);
    if (unit_ok)
#pragma unroll
      for (int rank = 0; rank < SPLIT; ++rank) mail.send(rank, address, run);
  };
#else
  __syncthreads();
#endif
  u32 w_registers[W_STEPS][TILES][2];
  if constexpr (W_REGISTERS)
#pragma unroll
    for (int k = 0; k < W_STEPS; ++k) load_b<TILES, W_STRIDE>(w_registers[k], b, k * 16);

  StepInputs inputs[PARITIES];
  // Addresses are a pointer to the step, the same for all threads, plus 32-bit offsets that do not change from step to step.
  auto load_inputs = [&](StepInputs& in, int t, int chunk_row) {
    const u16* gates_now = p.gates + (i64)t * batch * (GATES * HIDDEN);
    const u8* resets_next = p.resets + (i64)(t + 1) * batch;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        const int row = chunk_row + lane_row + m * 16 + half * 8;
        const bool ok = row < batch && unit_ok && t < steps;
#pragma unroll
        for (int gate = 0; gate < GATES; ++gate) {
          if (ok) load_words(in.x[m][half][gate], gates_now + (u32)(row * (GATES * HIDDEN) + unit) + gate * HIDDEN);
          else
#pragma unroll
            for (int i = 0; i < UT / 2; ++i) in.x[m][half][gate][i] = 0;
        }
        in.reset_next[m][half] = RESETS && ok && t + 1 < steps ? resets_next[(u32)row] : 0;
      }
  };

  // The state that enters step 0.
  float kept[MT][HALVES][UT];
  u8 reset_now[MT][HALVES];
  for (int chunk = first_chunk; chunk < p.chunks; chunk += next_chunk) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        const int local = lane_row + m * 16 + half * 8, row = chunk * R + local;
        const bool ok = row < batch && unit_ok;
        const bool reset = RESETS && ok && p.resets[row];
        reset_now[m][half] = reset;
        float h[UT];
#pragma unroll
        for (int u = 0; u < UT; ++u) {
          h[u] = ok ? (reset ? start_h[u] : p.h0[(i64)row * HIDDEN + unit + u]) : 0.0f;
          if constexpr (ONE_CHUNK) kept[m][half][u] = ok ? p.carry0[(i64)row * HIDDEN + unit + u] : 0.0f;
        }
        HalfRun run;
        to_half_run(run, h);
#if CLUSTER
        send_h(local, run);
#endif
        if (ok && (!IN_SHARED || SAVE)) store_words(p.h_in + (i64)row * p.h_stride + unit, run);
        if (SPLIT == 1 && ok)
#pragma unroll
          for (int i = 0; i < UT / 2; ++i) ((u32*)(a + local * A_STRIDE + unit))[i] = run[i];
      }
    if constexpr (!IN_SHARED) arrive(p.arrivals + chunk);
    if constexpr (ONE_CHUNK) load_inputs(inputs[0], 0, chunk * R);
  }
  if constexpr (SPLIT == 1) sync_team();

  for (int t0 = 0; t0 < steps; t0 += PARITIES)
#pragma unroll
  for (int parity = 0; parity < PARITIES; ++parity) {
    const int t = t0 + parity;
    if (t >= steps) break;
    const i64 first = (i64)t * batch;
    u16* const h_next = p.h_in + (SAVE ? first + batch : (i64)((t + 1) & 1) * batch) * p.h_stride;
    u16* const gates_now = p.gates + first * (GATES * HIDDEN);
    u16* const saved_now = p.saved + first * HIDDEN;
    void* const y_now = (u8*)p.y + first * HIDDEN * Y_BYTES;
    StepInputs& in = inputs[parity];
    for (int chunk = first_chunk; chunk < p.chunks; chunk += next_chunk) {
      const int chunk_row = chunk * R;
      // Everything that does not depend on the other blocks is fetched before waiting for them.
      load_inputs(inputs[PARITIES - 1 - parity], t + PARITIES - 1, chunk_row);
      FloatRun state[MT][HALVES];
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
          const int row = chunk_row + lane_row + m * 16 + half * 8;
          const bool ok = row < batch && unit_ok;
          if constexpr (!ONE_CHUNK) {
            if (ok) load_words(state[m][half], (t ? p.carry : p.carry0) + (i64)row * HIDDEN + unit);
            else
#pragma unroll
              for (int u = 0; u < UT; ++u) state[m][half][u] = 0;
            reset_now[m][half] = RESETS && ok ? p.resets[first + row] : 0;
          }
        }
      if constexpr (!IN_SHARED) wait(p.arrivals + chunk, (u32)SPLIT * (t + 1));

      float acc_sets[1][MT][TILES][4];
      clear<TILES, 1>(acc_sets);
#if CLUSTER
      multiply<KP, TILES, 1, A_STRIDE, W_STRIDE>(acc_sets, shared_address(a + mail.receive() * R * A_STRIDE) + a_lane, b, w_registers);
#else
      if constexpr (SPLIT == 1) {
        multiply<KP, TILES, 1, A_STRIDE, W_STRIDE>(acc_sets, shared_address(a) + a_lane, b, w_registers);
        sync_team();
      } else {
        const i64 slot = SAVE ? first : (i64)(t & 1) * batch;
        multiply_streamed<K, TILES, 1, W_STRIDE>(acc_sets, p.h_in + (slot + chunk_row) * p.h_stride, p.h_stride,
                                                 batch - chunk_row, a, a_lane, b, w_registers);
      }
#endif
      auto& acc = acc_sets[0];

      // First the values that other blocks wait for, then the rest.
      HalfRun out[MT][HALVES][GATES], extra[MT][HALVES];
      float h[MT][HALVES][UT];
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
          const int local = lane_row + m * 16 + half * 8, row = chunk_row + local;
          const bool ok = row < batch && unit_ok;
          float gate_values[GATES][UT], extra_values[UT], after[UT], next[UT];
          // Roundings are written out: left to the compiler, they differ between kernels, and a step would not replay a sequence.
#pragma unroll
          for (int u = 0; u < UT; ++u) {
            const int j = u / 2, slot = half * 2 + u % 2;
            float before = ONE_CHUNK ? kept[m][half][u] : __uint_as_float(state[m][half][u]);
            if (RESETS && reset_now[m][half]) before = GRU ? start_h[u] : start_c[u];
            auto input = [&](int gate) { return __fmaf_rn(half_at(in.x[m][half][gate], u), gate_factor(gate), bias[gate][u]); };
            float v0 = __fmaf_rn(acc[m][j][slot], gate_factor(0), input(0));
            float v1 = __fmaf_rn(acc[m][J + j][slot], gate_factor(1), input(1));
            float v2 = input(2);
            if constexpr (GRU) {
              extra_values[u] = __fadd_rn(acc[m][2 * J + j][slot], bias_hidden[u]);
              sigmoid2(v0, v1);
              v2 = tanh_(__fmaf_rn(v0, extra_values[u], v2));
              after[u] = __fmaf_rn(v1, __fsub_rn(before, v2), v2);
              h[m][half][u] = after[u];
            } else {
              float v3 = __fmaf_rn(acc[m][(GATES - 1) * J + j][slot], gate_factor(3), input(GATES - 1));
              v2 = __fmaf_rn(acc[m][2 * J + j][slot], gate_factor(2), v2);
              lstm_gates(v0, v1, v2, v3);
              after[u] = __fmaf_rn(v1, before, __fmul_rn(v0, v2));
              h[m][half][u] = v3 * tanh_(after[u]);
              extra_values[u] = before;
              gate_values[GATES - 1][u] = v3;
            }
            gate_values[0][u] = v0;
            gate_values[1][u] = v1;
            gate_values[2][u] = v2;
            next[u] = RESETS && in.reset_next[m][half] ? start_h[u] : h[m][half][u];
          }
          if ((ok || CLUSTER) && t + 1 < steps) {
            HalfRun run;
            to_half_run(run, next);
#if CLUSTER
            send_h(local, run);
#endif
            if (ok && (!IN_SHARED || SAVE)) store_words(h_next + (u32)(row * p.h_stride + unit), run);
            if constexpr (SPLIT == 1)
#pragma unroll
              for (int i = 0; i < UT / 2; ++i) ((u32*)(a + local * A_STRIDE + unit))[i] = run[i];
          }
          if constexpr (SAVE) {
#pragma unroll
            for (int gate = 0; gate < GATES; ++gate) to_half_run(out[m][half][gate], gate_values[gate]);
            to_half_run(extra[m][half], extra_values);
          }
          if constexpr (ONE_CHUNK)
#pragma unroll
            for (int u = 0; u < UT; ++u) kept[m][half][u] = after[u];
          if (ok && (!ONE_CHUNK || t + 1 == steps)) {
            FloatRun words;
#pragma unroll
            for (int u = 0; u < UT; ++u) words[u] = __float_as_uint(after[u]);
            store_words(p.carry + (i64)row * HIDDEN + unit, words);
          }
        }
      if constexpr (SPLIT == 1) sync_team();
      else if constexpr (!CLUSTER) {
        if (t + 1 < steps) arrive(p.arrivals + chunk);
        else sync_team();
      }
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
          const int row = chunk_row + lane_row + m * 16 + half * 8;
          if (row < batch && unit_ok) {
            store_y(y_now, (u32)(row * HIDDEN + unit), h[m][half]);
            if constexpr (SAVE) {
#pragma unroll
              for (int gate = 0; gate < GATES; ++gate)
                store_words(gates_now + (u32)(row * (GATES * HIDDEN) + unit) + gate * HIDDEN, out[m][half][gate]);
              store_words(saved_now + (u32)(row * HIDDEN + unit), extra[m][half]);
            }
            if (!GRU && t + 1 == steps)
#pragma unroll
              for (int u = 0; u < UT; ++u) p.h_n[(i64)row * HIDDEN + unit + u] = h[m][half][u];
          }
          if constexpr (ONE_CHUNK) reset_now[m][half] = in.reset_next[m][half];
        }
    }
  }
#if CLUSTER
  sync_cluster();  // nobody leaves while others write into its memory
#endif
}
