/* The forward pass: input products by chunks of time, then step by step the state's product and the gates. */
#ifndef HOLDFAST_FORWARD_H
#define HOLDFAST_FORWARD_H

#include "spans.h"

typedef struct {
    const Job *job;
    Sizes s;
    float *bias;              /* [4][padded] */
    float *reset_h, *reset_c; /* [padded] */
    int64_t parts;
    int failed;
} Forward;

/* Scratch of one part, used by its groups of spans in turn. Each part packs the weights for itself, because
 * fetching them from another core's cache takes longer. */
typedef struct {
    float *w_x, *w_h; /* [units][inputs or hidden][gates][LANES] */
    const float **x_rows, **h_rows;
    float **gate_rows;
    float *cell_state; /* [rows][padded]: where c starts, and where it stays if nothing is kept */
    float *gates;      /* [chunk][row] if nothing is kept */
    float *result;
} ForwardScratch;

static void forward_scratch(ForwardScratch *f, Arena *arena, const Forward *call, int64_t rows) {
    const Sizes *s = &call->s;
    int64_t chunk = chunk_bound(rows);
    f->w_x = take_floats(arena, s->cell.gates * s->padded * s->inputs);
    f->w_h = take_floats(arena, s->cell.gates * s->padded * s->hidden);
    f->x_rows = take(arena, (size_t)chunk * sizeof(float *));
    f->gate_rows = take(arena, (size_t)chunk * sizeof(float *));
    f->h_rows = take(arena, (size_t)rows * sizeof(float *));
    f->cell_state = take_floats(arena, call->job->is_lstm ? rows * s->padded : 0);
    f->gates = take_floats(arena, call->job->gates ? 0 : chunk * s->row);
    f->result = take_floats(arena, MAX_ROWS * PANEL);
}

/* gates = bias + x W_ih^T for a chunk of rows. */
static void project_inputs(const Forward *call, ForwardScratch *f, int64_t rows) {
    const Sizes *s = &call->s;
    const int64_t gates = s->cell.gates;
    for (int64_t u = 0; u < s->units; u++) {
        const float *panel = f->w_x + u * s->inputs * gates * LANES;
        for (int64_t i = 0; i < block_count(rows); i++) {
            int64_t first = block_start(rows, i), count = block_start(rows, i + 1) - first;
            tiles[gates - 1][count - 1](s->inputs, f->x_rows + first, panel, f->result);
            for (int64_t r = 0; r < count; r++)
                for (int64_t g = 0; g < gates; g++) {
                    int64_t at = g * s->padded + u * LANES;
                    store(f->gate_rows[first + r] + at, load(f->result + (r * gates + g) * LANES) + load(call->bias + at));
                }
        }
    }
}

/* The gates of LANES units of one row: in `gate` the input's part, in `recurrent` the state's. Leaves the activated
 * gates in place if they are kept. */
INLINE void lstm_gates(float *gate, int64_t stride, const float *recurrent, const float *c_before, float *c, float *h,
                       int64_t count, int keep) {
    vec i = sigmoid(load(gate) + load(recurrent));
    vec f = sigmoid(load(gate + stride) + load(recurrent + LANES));
    vec g = tanh_(load(gate + 2 * stride) + load(recurrent + 2 * LANES));
    vec o = sigmoid(load(gate + 3 * stride) + load(recurrent + 3 * LANES));
    vec cell = f * load(c_before) + i * g;
    store(c, cell);
    store_first(h, o * tanh_(cell), count);
    if (keep) {
        store(gate, i);
        store(gate + stride, f);
        store(gate + 2 * stride, g);
        store(gate + 3 * stride, o);
    }
}

INLINE void gru_gates(float *gate, int64_t stride, const float *recurrent, const float *bias_hn, const float *h_before,
                      float *h, int64_t count, int keep) {
    vec r = sigmoid(load(gate + stride) + load(recurrent));
    vec z = sigmoid(load(gate + 2 * stride) + load(recurrent + LANES));
    vec hn = load(recurrent + 2 * LANES) + load(bias_hn);
    vec n = tanh_(load(gate) + r * hn);
    store_first(h, n + z * (load_first(h_before, count) - n), count);
    if (keep) {
        store(gate, n);
        store(gate + stride, r);
        store(gate + 2 * stride, z);
        store(gate + 3 * stride, hn);
    }
}

/* One step of a group's first `active` spans, each at its own time. */
INLINE void forward_step(const Forward *call, ForwardScratch *f, const Span *spans, int64_t active, int64_t step,
                         float *const *gate_rows, const int lstm) {
    const Job *job = call->job;
    const Sizes *s = &call->s;
    const int keep = job->gates != NULL;
    const int64_t gates = lstm ? 4 : 3, hidden = s->hidden, padded = s->padded;
    for (int64_t b = 0; b < active; b++) {
        const Span *span = spans + b;
        const float *start = span->fresh ? call->reset_h : job->h0 + span->row * hidden;
        f->h_rows[b] = step ? job->y + ((span->begin + step - 1) * s->batch + span->row) * hidden : start;
    }
    for (int64_t n = 0; n < s->units; n++) {
        const int64_t u = step % 2 ? s->units - 1 - n : n; /* back and forth: what was read last is still in cache */
        const float *panel = f->w_h + u * hidden * gates * LANES;
        const int64_t unit = u * LANES, count = hidden - unit;
        for (int64_t i = 0; i < block_count(active); i++) {
            int64_t b0 = block_start(active, i), b1 = block_start(active, i + 1);
            tiles[gates - 1][b1 - b0 - 1](hidden, f->h_rows + b0, panel, f->result);
            for (int64_t b = b0; b < b1; b++) {
                const int64_t now = (spans[b].begin + step) * s->batch + spans[b].row;
                float *gate = gate_rows[b] + unit, *h = job->y + now * hidden + unit;
                const float *recurrent = f->result + (b - b0) * gates * LANES;
                if (lstm) {
                    float *own = f->cell_state + b * padded + unit;
                    float *c = keep ? job->cells + now * padded + unit : own;
                    lstm_gates(gate, padded, recurrent, keep && step ? c - s->batch * padded : own, c, h, count, keep);
                } else {
                    gru_gates(gate, padded, recurrent, call->bias + 3 * padded + unit, f->h_rows[b] + unit, h, count, keep);
                }
            }
        }
    }
}

/* A group of spans side by side, through all of their time. */
INLINE void forward_group(const Forward *call, ForwardScratch *f, const Span *spans, int64_t count, const int lstm) {
    const Job *job = call->job;
    const Sizes *s = &call->s;
    const int keep = job->gates != NULL;
    const int64_t hidden = s->hidden, padded = s->padded, longest = spans[0].length;
    for (int64_t b = 0; lstm && b < count; b++) {
        if (spans[b].fresh) memcpy(f->cell_state + b * padded, call->reset_c, (size_t)padded * sizeof(float));
        else copy_padded(f->cell_state + b * padded, job->c0 + spans[b].row * hidden, hidden, padded);
    }

    int64_t active = count;
    for (int64_t step = 0; step < longest;) {
        int64_t rows = 0, end = step;
        for (int64_t left = active; end < longest; end++) {
            left = still_active(spans, left, end);
            if (rows && rows + left > CHUNK_ROWS) break;
            for (int64_t b = 0; b < left; b++, rows++) {
                int64_t at = (spans[b].begin + end) * s->batch + spans[b].row;
                f->x_rows[rows] = job->x + at * s->inputs;
                f->gate_rows[rows] = keep ? job->gates + at * s->row : f->gates + rows * s->row;
            }
        }
        project_inputs(call, f, rows);
        for (int64_t row = 0; step < end; step++, row += active) {
            active = still_active(spans, active, step);
            forward_step(call, f, spans, active, step, (float *const *)f->gate_rows + row, lstm);
        }
    }

    for (int64_t b = 0; b < count; b++) {
        if (spans[b].begin + spans[b].length < s->steps) continue;
        const int64_t last = (s->steps - 1) * s->batch + spans[b].row, to = spans[b].row * hidden;
        if (job->h_n) memcpy(job->h_n + to, job->y + last * hidden, (size_t)hidden * sizeof(float));
        if (lstm) copy_unpadded(job->c_n + to, keep ? job->cells + last * padded : f->cell_state + b * padded, hidden);
    }
}

/* Weights of `gates` blocks [hidden, depth] as panels [units][depth][gates][LANES]. */
static void pack_forward(float *out, const float *weights, const int64_t *order, const Sizes *s, int64_t depth) {
    const int64_t gates = s->cell.gates;
    for (int64_t u = 0; u < s->units; u++)
        for (int64_t g = 0; g < gates; g++)
            pack_transposed(out + (u * depth * gates + g) * LANES, gates * LANES,
                            weights + (order[g] * s->hidden + u * LANES) * depth, depth, s->hidden - u * LANES, depth);
}

static void forward_part(void *context, int64_t part) {
    Forward *call = context;
    const Job *job = call->job;
    const int64_t from = call->s.batch * part / call->parts, to = call->s.batch * (part + 1) / call->parts;
    const int split = !job->detach_at_reset; /* if resets leave values alone, rows stay whole */
    const int64_t count = job->steps ? count_spans(job, from, to, split) : 0, groups = (count + GROUP_ROWS - 1) / GROUP_ROWS;
    if (job->steps == 0 && to > from) {
        const size_t bytes = (size_t)((to - from) * job->hidden) * sizeof(float);
        if (job->h_n) memcpy(job->h_n + from * job->hidden, job->h0 + from * job->hidden, bytes);
        if (job->is_lstm) memcpy(job->c_n + from * job->hidden, job->c0 + from * job->hidden, bytes);
    }
    if (groups == 0) return;
    Arena arena = {0, 0};
    ForwardScratch scratch;
    Span *spans = NULL;
    int64_t *starts = NULL;
    Block block = {NULL, 0};
    for (int placed = 0; placed < 2; placed++) { /* measure, then place */
        if (placed) {
            block = holdfast_borrow(OF_ONE_PART, arena.used);
            if (!block.memory) {
                call->failed = 1;
                return;
            }
            arena = (Arena){(uintptr_t)block.memory, 0};
        }
        spans = take(&arena, (size_t)count * sizeof(Span));
        starts = take(&arena, (size_t)(job->steps + 1) * sizeof(int64_t));
        forward_scratch(&scratch, &arena, call, (count + groups - 1) / groups);
    }
    find_spans(spans, starts, job, from, to, split);
    pack_forward(scratch.w_x, job->w_ih, call->s.cell.x_gate, &call->s, job->inputs);
    pack_forward(scratch.w_h, job->w_hh, call->s.cell.h_gate, &call->s, job->hidden);
    unsigned int mode = flush_denormals();
    for (int64_t g = 0; g < groups; g++) {
        const int64_t first = count * g / groups, rows = count * (g + 1) / groups - first;
        if (job->is_lstm) forward_group(call, &scratch, spans + first, rows, 1);
        else forward_group(call, &scratch, spans + first, rows, 0);
    }
    restore_denormals(mode);
    holdfast_give_back(OF_ONE_PART, block);
}

static void forward_memory(Forward *call, Arena *arena) {
    const Sizes *s = &call->s;
    call->bias = take_floats(arena, s->row);
    call->reset_h = take_floats(arena, s->padded);
    call->reset_c = take_floats(arena, s->padded);
}

static int forward(const Job *job) {
    Forward call = {.job = job, .s = sizes_of(job), .parts = job->threads};
    const Sizes *s = &call.s;
    Arena arena = {0, 0};
    forward_memory(&call, &arena);
    Block block = holdfast_borrow(SHARED_BY_PARTS, arena.used);
    if (!block.memory) return 1;
    arena = (Arena){(uintptr_t)block.memory, 0};
    forward_memory(&call, &arena);

    zero(call.bias, s->row);
    for (int64_t g = 0; g < s->cell.gates; g++)
        for (int64_t j = 0; j < s->hidden; j++) {
            /* the state's bias of the GRU's candidate lies in slot 3, apart from the input's in slot 0 */
            if (job->b_ih) call.bias[g * s->padded + j] += job->b_ih[s->cell.x_gate[g] * s->hidden + j];
            if (job->b_hh) call.bias[(s->cell.h_slot + g) * s->padded + j] += job->b_hh[s->cell.h_gate[g] * s->hidden + j];
        }
    copy_padded(call.reset_h, job->reset_h, s->hidden, s->padded);
    copy_padded(call.reset_c, job->reset_c, s->hidden, s->padded);
    holdfast_parallel(forward_part, &call, call.parts);
    holdfast_give_back(SHARED_BY_PARTS, block);
    return call.failed;
}

#endif
