/* The backward pass: gate gradients and their product with W_hh step by step from the end; gradients of inputs and
 * weights by chunks of time. */
#ifndef HOLDFAST_BACKWARD_H
#define HOLDFAST_BACKWARD_H

#include "spans.h"

typedef struct {
    float *dw_x[4], *dw_h[4];     /* per gate [padded][padded_inputs or padded]; the caller's memory where it fits */
    int begun;                    /* dw holds sums; before, it is uninitialized */
    float *db;                    /* [4][padded] */
    float *d_reset_h, *d_reset_c; /* [padded] */
} Sums;

typedef struct {
    const Job *job;
    Sizes s;
    int64_t stride;           /* of a row of gate gradients; no power of two, because cache lines would collide */
    float *reset_h, *reset_c; /* [padded] */
    Sums *sums;               /* [parts] */
    int64_t parts;
    int failed;
} Backward;

typedef struct {
    float *w_x, *w_h;                  /* panels of columns, each [gates * padded][vectors][LANES] */
    const float **h_before, **dg_rows; /* [chunk] */
    const float **x_rows;              /* [chunk] */
    int64_t *at;                       /* [chunk]: a row's step * batch + batch row */
    float *dg;                         /* [chunk][stride] */
    float *dh, *dc;                    /* [rows][padded]: what arrives from the step after */
    float *c0;                         /* [rows][padded] */
    float *panels;                     /* [chunk][padded_inputs or padded] */
    float *result;
} BackwardScratch;

static void backward_scratch(BackwardScratch *f, Arena *arena, const Backward *call, int64_t rows) {
    const Sizes *s = &call->s;
    const int64_t chunk = chunk_bound(rows), lstm_rows = call->job->is_lstm ? rows : 0;
    const int64_t gate_columns = s->cell.gates * s->padded;
    f->w_x = take_floats(arena, call->job->dx ? gate_columns * s->padded_inputs : 0);
    f->w_h = take_floats(arena, gate_columns * s->padded);
    f->h_before = take(arena, (size_t)chunk * sizeof(float *));
    f->dg_rows = take(arena, (size_t)chunk * sizeof(float *));
    f->x_rows = take(arena, (size_t)chunk * sizeof(float *));
    f->at = take(arena, (size_t)chunk * sizeof(int64_t));
    f->dg = take_floats(arena, chunk * call->stride);
    f->dh = take_floats(arena, rows * s->padded);
    f->dc = take_floats(arena, lstm_rows * s->padded);
    f->c0 = take_floats(arena, lstm_rows * s->padded);
    f->panels = take_floats(arena, chunk * (s->padded > s->padded_inputs ? s->padded : s->padded_inputs));
    f->result = take_floats(arena, MAX_ROWS * PANEL);
}

INLINE vec incoming(const float *dy, int64_t count) { return dy ? load_first(dy, count) : splat(0.0f); }

/* LANES units of one row. dc becomes the gradient of the cell before this step. */
INLINE void lstm_gate_gradients(const float *gate, int64_t stride, const float *c, const float *c_before, vec dh, float *dc,
                                float *dg, vec *db) {
    const vec one = splat(1.0f);
    vec i = load(gate), f = load(gate + stride), g = load(gate + 2 * stride), o = load(gate + 3 * stride);
    vec squashed = tanh_(load(c));
    vec d_o = dh * squashed * o * (one - o);
    vec dcell = load(dc) + dh * o * (one - squashed * squashed);
    vec d_i = dcell * g * i * (one - i);
    vec d_f = dcell * load(c_before) * f * (one - f);
    vec d_g = dcell * i * (one - g * g);
    store(dc, dcell * f);
    store(dg, d_i);
    store(dg + stride, d_f);
    store(dg + 2 * stride, d_g);
    store(dg + 3 * stride, d_o);
    db[0] += d_i, db[1] += d_f, db[2] += d_g, db[3] += d_o;
}

/* dh becomes the part of the gradient of the state before this step that does not pass through the gates. */
INLINE void gru_gate_gradients(const float *gate, int64_t stride, vec h_before, vec dh_now, float *dh, float *dg, vec *db) {
    const vec one = splat(1.0f);
    vec n = load(gate), r = load(gate + stride), z = load(gate + 2 * stride), hn = load(gate + 3 * stride);
    vec d_n = dh_now * (one - z) * (one - n * n);
    vec d_z = dh_now * (h_before - n) * z * (one - z);
    vec d_r = d_n * hn * r * (one - r);
    vec d_hn = d_n * r;
    store(dh, dh_now * z);
    store(dg, d_n);
    store(dg + stride, d_r);
    store(dg + 2 * stride, d_z);
    store(dg + 3 * stride, d_hn);
    db[0] += d_n, db[1] += d_r, db[2] += d_z, db[3] += d_hn;
}

/* The `step`th step from the end of each of a group's first `active` spans: updates their dh and dc. */
INLINE void backward_step(const Backward *call, BackwardScratch *f, Sums *sums, const Span *spans, int64_t active, int64_t step,
                          int64_t chunk_row, const int lstm) {
    const Job *job = call->job;
    const Sizes *s = &call->s;
    const int64_t hidden = s->hidden, padded = s->padded;
    const float **h_before = f->h_before + chunk_row;
    const int64_t *at = f->at + chunk_row;
    float *dg = f->dg + chunk_row * call->stride;
    for (int64_t b = 0; b < active; b++) {
        const float *start = at[b] < s->batch ? job->h0 + at[b] * hidden : job->y + (at[b] - s->batch) * hidden;
        h_before[b] = spans[b].length - 1 == step && spans[b].fresh && !job->detach_at_reset ? call->reset_h : start;
    }

    for (int64_t u = 0; u < s->units; u++) {
        const int64_t unit = u * LANES, count = hidden - unit;
        vec db[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
        for (int64_t b = 0; b < active; b++) {
            const float *gate = job->gates + at[b] * s->row + unit;
            float *dh = f->dh + b * padded + unit;
            vec dh_now = load(dh) + incoming(job->dy ? job->dy + at[b] * hidden + unit : NULL, count);
            if (lstm) {
                const float *c = job->cells + at[b] * padded + unit;
                const float *c_before = at[b] < s->batch ? f->c0 + b * padded + unit : c - s->batch * padded;
                if (spans[b].length - 1 == step && spans[b].fresh && !job->detach_at_reset) c_before = call->reset_c + unit;
                lstm_gate_gradients(gate, padded, c, c_before, dh_now, f->dc + b * padded + unit, dg + b * call->stride + unit,
                                    db);
            } else {
                gru_gate_gradients(gate, padded, load_first(h_before[b] + unit, count), dh_now, dh, dg + b * call->stride + unit,
                                   db);
            }
        }
        for (int64_t g = 0; g < 4; g++) {
            float *to = sums->db + g * padded + unit;
            store(to, load(to) + db[g]);
        }
    }

    const int64_t h_slot = lstm ? 0 : padded;
    for (int64_t b = 0; b < active; b++) f->dg_rows[b] = dg + b * call->stride + h_slot;
    product_rows(f->result, f->dg_rows, s->cell.gates * padded, f->w_h, padded, padded, NULL, f->dh, padded, active, !lstm,
                 step % 2);
}

/* A group of spans side by side, aligned at their ends. */
INLINE void backward_group(const Backward *call, BackwardScratch *f, Sums *sums, const Span *spans, int64_t count,
                           const int lstm) {
    const Job *job = call->job;
    const Sizes *s = &call->s;
    const int64_t hidden = s->hidden, padded = s->padded, gate_columns = s->cell.gates * padded, longest = spans[0].length;
    for (int64_t b = 0; b < count; b++) {
        const int64_t from = spans[b].row * hidden, to = b * padded;
        const int last = spans[b].begin + spans[b].length == s->steps;
        copy_padded(f->dh + to, last && job->dh_n ? job->dh_n + from : NULL, hidden, padded);
        if (!lstm) continue;
        copy_padded(f->dc + to, last && job->dc_n ? job->dc_n + from : NULL, hidden, padded);
        if (spans[b].begin == 0) copy_padded(f->c0 + to, job->c0 + from, hidden, padded);
    }

    int64_t active = count;
    for (int64_t step = 0; step < longest;) {
        int64_t rows = 0, end = step;
        for (int64_t left = active; end < longest; end++) {
            left = still_active(spans, left, end);
            if (rows && rows + left > CHUNK_ROWS) break;
            for (int64_t b = 0; b < left; b++, rows++)
                f->at[rows] = (spans[b].begin + spans[b].length - 1 - end) * s->batch + spans[b].row;
        }
        for (int64_t row = 0; step < end; step++, row += active) {
            active = still_active(spans, active, step);
            backward_step(call, f, sums, spans, active, step, row, lstm);
        }

        if (job->dx) {
            for (int64_t n = 0; n < rows; n++) {
                f->dg_rows[n] = f->dg + n * call->stride;
                f->x_rows[n] = job->dx + f->at[n] * s->inputs;
            }
            product_rows(f->result, f->dg_rows, gate_columns, f->w_x, s->inputs, s->padded_inputs, (float *const *)f->x_rows, NULL, 0,
                         rows, 0, 0);
        }
        if (job->dw_ih) {
            for (int64_t n = 0; n < rows; n++) f->x_rows[n] = job->x + f->at[n] * s->inputs;
            pack_panels(f->panels, f->x_rows, rows, s->inputs, s->padded_inputs);
            for (int64_t g = 0; g < s->cell.gates; g++)
                outer_products(f->panels, f->dg + g * padded, call->stride, padded, rows, s->padded_inputs, sums->dw_x[g],
                               sums->begun);
        }
        if (job->dw_hh) {
            pack_panels(f->panels, f->h_before, rows, hidden, padded);
            for (int64_t g = 0; g < s->cell.gates; g++)
                outer_products(f->panels, f->dg + (s->cell.h_slot + g) * padded, call->stride, padded, rows, padded,
                               sums->dw_h[g], sums->begun);
        }
        sums->begun = 1;
    }

    for (int64_t b = 0; b < count; b++) {
        const float *dh = f->dh + b * padded, *dc = f->dc + b * padded;
        const int64_t to = spans[b].row * hidden;
        for (int64_t u = 0; spans[b].fresh && u < padded; u += LANES) {
            store(sums->d_reset_h + u, load(sums->d_reset_h + u) + load(dh + u));
            if (lstm) store(sums->d_reset_c + u, load(sums->d_reset_c + u) + load(dc + u));
        }
        if (spans[b].begin > 0) continue;
        if (job->dh0 && !spans[b].fresh) copy_unpadded(job->dh0 + to, dh, hidden);
        if (job->dh0 && spans[b].fresh) zero(job->dh0 + to, hidden);
        if (job->dc0 && !spans[b].fresh) copy_unpadded(job->dc0 + to, dc, hidden);
        if (job->dc0 && spans[b].fresh) zero(job->dc0 + to, hidden);
    }
}

/* Whether the sums of one part can be formed in the caller's memory. */
INLINE int in_place(const Backward *call, int64_t columns) {
    return call->parts == 1 && call->s.hidden % LANES == 0 && columns % LANES == 0;
}

static void weight_sums(float **sums, Arena *arena, const Backward *call, float *out, const int64_t *order, int64_t columns) {
    const Sizes *s = &call->s;
    const int64_t padded = round_up(columns, LANES);
    for (int64_t g = 0; out && g < s->cell.gates; g++)
        sums[g] = in_place(call, columns) ? out + order[g] * s->hidden * columns : take_floats(arena, s->padded * padded);
}

static void sums_memory(Sums *sums, Arena *arena, const Backward *call) {
    const Sizes *s = &call->s;
    sums->begun = 0;
    sums->db = take_floats(arena, s->row);
    sums->d_reset_h = take_floats(arena, s->padded);
    sums->d_reset_c = take_floats(arena, s->padded);
    weight_sums(sums->dw_x, arena, call, call->job->dw_ih, s->cell.x_gate, s->inputs);
    weight_sums(sums->dw_h, arena, call, call->job->dw_hh, s->cell.h_gate, s->hidden);
}

static void pass_rows(float *out, const float *in, int64_t from, int64_t to) {
    for (int64_t i = from; out && i < to; i++) out[i] = in ? in[i] : 0.0f;
}

/* Weights of `gates` blocks [hidden, columns] as panels of columns, each [gates * padded][vectors][LANES]; the rows of
 * units beyond `hidden` are zeros. */
static void pack_backward(float *out, const float *weights, const int64_t *order, const Sizes *s, int64_t columns) {
    const int64_t padded_columns = round_up(columns, LANES), depth = s->cell.gates * s->padded;
    for (int64_t column = 0; column < padded_columns; column += PANEL) {
        const int64_t width = panel_vectors(padded_columns, column);
        float *panel = out + column * depth;
        for (int64_t g = 0; g < s->cell.gates; g++)
            for (int64_t j = 0; j < s->padded; j++)
                for (int64_t v = 0; v < width; v++) {
                    const int64_t at = column + v * LANES;
                    const float *from = weights + (order[g] * s->hidden + j) * columns + at;
                    store(panel + ((g * s->padded + j) * width + v) * LANES,
                          j < s->hidden ? load_first(from, columns - at) : splat(0.0f));
                }
    }
}

static void backward_part(void *context, int64_t part) {
    Backward *call = context;
    const Job *job = call->job;
    const Sizes *s = &call->s;
    Sums *sums = call->sums + part;
    const int64_t from = s->batch * part / call->parts, to = s->batch * (part + 1) / call->parts;
    const int64_t count = s->steps ? count_spans(job, from, to, 1) : 0, groups = (count + GROUP_ROWS - 1) / GROUP_ROWS;
    zero(sums->db, s->row);
    zero(sums->d_reset_h, s->padded);
    zero(sums->d_reset_c, s->padded);
    for (int64_t g = 0; groups == 0 && g < s->cell.gates; g++) {
        if (job->dw_ih) zero(sums->dw_x[g], s->padded * s->padded_inputs);
        if (job->dw_hh) zero(sums->dw_h[g], s->padded * s->padded);
    }
    if (s->steps == 0 && to > from) { /* the gradients of the states pass through */
        pass_rows(job->dh0, job->dh_n, from * s->hidden, to * s->hidden);
        pass_rows(job->dc0, job->dc_n, from * s->hidden, to * s->hidden);
    }
    if (groups == 0) return;

    Arena arena = {0, 0};
    BackwardScratch scratch;
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
        starts = take(&arena, (size_t)(s->steps + 1) * sizeof(int64_t));
        backward_scratch(&scratch, &arena, call, (count + groups - 1) / groups);
    }
    find_spans(spans, starts, job, from, to, 1);
    if (job->dx) pack_backward(scratch.w_x, job->w_ih, s->cell.x_gate, s, s->inputs);
    pack_backward(scratch.w_h, job->w_hh, s->cell.h_gate, s, s->hidden);
    unsigned int mode = flush_denormals();
    for (int64_t g = 0; g < groups; g++) {
        const int64_t first = count * g / groups, rows = count * (g + 1) / groups - first;
        if (job->is_lstm) backward_group(call, &scratch, sums, spans + first, rows, 1);
        else backward_group(call, &scratch, sums, spans + first, rows, 0);
    }
    restore_denormals(mode);
    holdfast_give_back(OF_ONE_PART, block);
}

static void backward_memory(Backward *call, Arena *arena) {
    const Sizes *s = &call->s;
    call->reset_h = take_floats(arena, s->padded);
    call->reset_c = take_floats(arena, s->padded);
    call->sums = take(arena, (size_t)call->parts * sizeof(Sums));
    for (int64_t part = 0; part < call->parts; part++) {
        Sums unplaced;
        sums_memory(arena->base ? call->sums + part : &unplaced, arena, call);
    }
}

/* The parts' sums of weight gradients, in torch's order of gates. */
static void write_weights(const Backward *call, float *out, int64_t which_h, int64_t columns) {
    const Sizes *s = &call->s;
    const int64_t padded_columns = round_up(columns, LANES);
    const int64_t *order = which_h ? s->cell.h_gate : s->cell.x_gate;
    for (int64_t g = 0; g < s->cell.gates; g++)
        for (int64_t j = 0; j < s->hidden; j++)
            for (int64_t c = 0; c < columns; c += LANES) {
                vec sum = splat(0.0f);
                for (int64_t part = 0; part < call->parts; part++)
                    sum += load((which_h ? call->sums[part].dw_h : call->sums[part].dw_x)[g] + j * padded_columns + c);
                store_first(out + (order[g] * s->hidden + j) * columns + c, sum, columns - c);
            }
}

static void write_bias(const Backward *call, float *out, const int64_t *order, int64_t first_slot) {
    const Sizes *s = &call->s;
    for (int64_t g = 0; g < s->cell.gates; g++)
        for (int64_t j = 0; j < s->hidden; j++) {
            float sum = 0.0f;
            for (int64_t part = 0; part < call->parts; part++)
                sum += call->sums[part].db[(first_slot + g) * s->padded + j];
            out[order[g] * s->hidden + j] = sum;
        }
}

static int backward(const Job *job) {
    Backward call = {.job = job, .s = sizes_of(job), .parts = job->threads};
    const Sizes *s = &call.s;
    call.stride = s->row + LANES;
    Arena arena = {0, 0};
    backward_memory(&call, &arena);
    Block block = holdfast_borrow(SHARED_BY_PARTS, arena.used);
    if (!block.memory) return 1;
    arena = (Arena){(uintptr_t)block.memory, 0};
    backward_memory(&call, &arena);

    copy_padded(call.reset_h, job->reset_h, s->hidden, s->padded);
    copy_padded(call.reset_c, job->reset_c, s->hidden, s->padded);
    holdfast_parallel(backward_part, &call, call.parts);

    if (!call.failed) {
        if (job->dw_ih && !in_place(&call, s->inputs)) write_weights(&call, job->dw_ih, 0, s->inputs);
        if (job->dw_hh && !in_place(&call, s->hidden)) write_weights(&call, job->dw_hh, 1, s->hidden);
        if (job->db_ih) write_bias(&call, job->db_ih, s->cell.x_gate, 0);
        if (job->db_hh) write_bias(&call, job->db_hh, s->cell.h_gate, s->cell.h_slot);
        for (int64_t j = 0; j < s->hidden; j++) {
            float h = 0.0f, c = 0.0f;
            for (int64_t part = 0; part < call.parts; part++) {
                h += call.sums[part].d_reset_h[j];
                c += call.sums[part].d_reset_c[j];
            }
            if (job->d_reset_h) job->d_reset_h[j] = h;
            if (job->d_reset_c) job->d_reset_c[j] = c;
        }
    }
    holdfast_give_back(SHARED_BY_PARTS, block);
    return call.failed;
}

#endif
