/* One step of few rows without gradients: weights are read in torch's layout, since packing them would cost as much as
 * the products. Sums run along the rows of the weights, LANES of them at a time, and are folded together at the end. */
#ifndef HOLDFAST_STEP_H
#define HOLDFAST_STEP_H

#include "forward.h"

/* Packing pays off from this many rows. */
#define PACKED_ROWS 24

/* Lane i of the result is the sum of the lanes of sums[i]. Halves meet: first single floats, then pairs, then quads. */
INLINE vec fold(const vec *sums) {
#if !defined(__has_builtin)
#define __has_builtin(x) 0
#endif
#if __has_builtin(__builtin_shufflevector)
#if LANES == 16
#define SINGLES(a, b)                                                                                                \
    (__builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +                       \
     __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31))
#define PAIRS(a, b)                                                                                                  \
    (__builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +                       \
     __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
#define QUADS(a, b)                                                                                                  \
    (__builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23) +                         \
     __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31))
#define EIGHTS(a, b)                                                                                                 \
    (__builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +                         \
     __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#elif LANES == 8
#define SINGLES(a, b)                                                                                                \
    (__builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15))
#define PAIRS(a, b)                                                                                                  \
    (__builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15))
#define QUADS(a, b)                                                                                                  \
    (__builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15))
#else
#define SINGLES(a, b) (__builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7))
#define PAIRS(a, b) (__builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7))
#endif
    vec quads[LANES / 4]; /* each: 4 sums, still spread over LANES / 4 groups of lanes */
    UNROLL for (int i = 0; i < LANES / 4; i++)
        quads[i] = PAIRS(SINGLES(sums[4 * i], sums[4 * i + 1]), SINGLES(sums[4 * i + 2], sums[4 * i + 3]));
#if LANES == 16
    return EIGHTS(QUADS(quads[0], quads[1]), QUADS(quads[2], quads[3]));
#elif LANES == 8
    return QUADS(quads[0], quads[1]);
#else
    return quads[0];
#endif
#else
    float totals[LANES];
    for (int i = 0; i < LANES; i++) {
        float lanes[LANES], total = 0.0f;
        store(lanes, sums[i]);
        for (int k = 0; k < LANES; k++) total += lanes[k];
        totals[i] = total;
    }
    return load(totals);
#endif
}

/* Adds to sums[b][w] the products of left[b] and right[w] along their `depth` floats, still spread over the lanes. */
#define DOT(ROWS, WEIGHTS)                                                                                           \
    INLINE void dot_##ROWS(vec *sums, const float *const *left, const float *const *right, int64_t depth) {          \
        const float *l[ROWS], *r[WEIGHTS];                                                                           \
        UNROLL for (int b = 0; b < ROWS; b++) l[b] = left[b];                                                        \
        UNROLL for (int w = 0; w < WEIGHTS; w++) r[w] = right[w];                                                    \
        int64_t k = 0;                                                                                               \
        for (; k + LANES <= depth; k += LANES) {                                                                     \
            vec row[ROWS];                                                                                           \
            UNROLL for (int b = 0; b < ROWS; b++) row[b] = load(l[b] + k);                                           \
            UNROLL for (int w = 0; w < WEIGHTS; w++) {                                                               \
                vec weight = load(r[w] + k);                                                                         \
                UNROLL for (int b = 0; b < ROWS; b++) sums[b * WEIGHTS + w] += row[b] * weight;                      \
            }                                                                                                        \
        }                                                                                                            \
        if (k == depth) return;                                                                                      \
        UNROLL for (int w = 0; w < WEIGHTS; w++) {                                                                   \
            vec weight = load_first(r[w] + k, depth - k);                                                            \
            UNROLL for (int b = 0; b < ROWS; b++) sums[b * WEIGHTS + w] += load_first(l[b] + k, depth - k) * weight;  \
        }                                                                                                            \
    }

typedef struct {
    const float *weights, *bias; /* of one gate: [hidden, depth], [hidden] or NULL */
    const float *const *rows;    /* [batch] of [depth] */
    int64_t depth;
} Term;

/* For one gate: out[b][j] = sum of the terms (one, or both), for ROWS rows from `first` on. */
#define GATE(ROWS, WEIGHTS)                                                                                          \
    DOT(ROWS, WEIGHTS)                                                                                               \
    static void gate_##ROWS(const Term *terms, int count, int64_t hidden, int64_t first, float *out, int64_t stride) { \
        for (int64_t j = 0; j < hidden; j += WEIGHTS) {                                                              \
            vec sums[LANES];                                                                                         \
            UNROLL for (int i = 0; i < LANES; i++) sums[i] = splat(0.0f);                                            \
            for (int t = 0; t < count; t++) {                                                                        \
                const float *weights[WEIGHTS];                                                                       \
                for (int64_t w = 0; w < WEIGHTS; w++) /* beyond the last unit: the last one again */                 \
                    weights[w] = terms[t].weights + smaller(j + w, hidden - 1) * terms[t].depth;                     \
                dot_##ROWS(sums, terms[t].rows + first, weights, terms[t].depth);                                    \
            }                                                                                                        \
            float totals[LANES];                                                                                     \
            store(totals, fold(sums));                                                                               \
            for (int64_t w = 0; w < WEIGHTS && j + w < hidden; w++) {                                                \
                float bias = 0.0f;                                                                                   \
                for (int t = 0; t < count; t++) bias += terms[t].bias ? terms[t].bias[j + w] : 0.0f;                 \
                for (int64_t b = 0; b < ROWS; b++) out[(first + b) * stride + j + w] = totals[b * WEIGHTS + w] + bias; \
            }                                                                                                        \
        }                                                                                                            \
    }

GATE(1, LANES)
#if LANES >= 8
GATE(2, LANES / 2)
#endif
#if LANES >= 16
GATE(4, LANES / 4)
GATE(8, LANES / 8)
#endif

static void gate_rows(const Term *terms, int count, int64_t hidden, int64_t batch, float *out, int64_t stride) {
    for (int64_t b = 0; b < batch;) {
#if LANES >= 16
        if (batch - b >= 8) {
            gate_8(terms, count, hidden, b, out, stride);
            b += 8;
            continue;
        }
        if (batch - b >= 4) {
            gate_4(terms, count, hidden, b, out, stride);
            b += 4;
            continue;
        }
#endif
#if LANES >= 8
        if (batch - b >= 2) {
            gate_2(terms, count, hidden, b, out, stride);
            b += 2;
            continue;
        }
#endif
        gate_1(terms, count, hidden, b, out, stride);
        b += 1;
    }
}

typedef struct {
    const float **x_rows, **h_rows;
    float *gates;             /* [batch][4][padded] */
    float *reset_h, *reset_c; /* [padded] */
    float *cell;              /* [padded] */
} StepScratch;

static void step_scratch(StepScratch *f, Arena *arena, const Sizes *s) {
    f->x_rows = take(arena, (size_t)s->batch * sizeof(float *));
    f->h_rows = take(arena, (size_t)s->batch * sizeof(float *));
    f->gates = take_floats(arena, s->batch * s->row);
    f->reset_h = take_floats(arena, s->padded);
    f->reset_c = take_floats(arena, s->padded);
    f->cell = take_floats(arena, s->padded);
}

static int step(const Job *job) {
    if (job->batch >= PACKED_ROWS) return forward(job);
    const Sizes s = sizes_of(job);
    const int64_t hidden = s.hidden, padded = s.padded;
    StepScratch f;
    Arena arena = {0, 0};
    step_scratch(&f, &arena, &s);
    Block block = holdfast_borrow(OF_ONE_PART, arena.used);
    if (!block.memory) return 1;
    arena = (Arena){(uintptr_t)block.memory, 0};
    step_scratch(&f, &arena, &s);
    copy_padded(f.reset_h, job->reset_h, hidden, padded);
    copy_padded(f.reset_c, job->reset_c, hidden, padded);
    if (padded > hidden) zero(f.gates, s.batch * s.row);
    for (int64_t b = 0; b < s.batch; b++) {
        f.x_rows[b] = job->x + b * s.inputs;
        f.h_rows[b] = job->resets && job->resets[b] ? f.reset_h : job->h0 + b * hidden;
    }

    for (int64_t g = 0; g < s.cell.gates; g++) {
        const float *b_ih = job->b_ih ? job->b_ih + g * hidden : NULL, *b_hh = job->b_hh ? job->b_hh + g * hidden : NULL;
        const Term terms[2] = {{job->w_ih + g * hidden * s.inputs, b_ih, f.x_rows, s.inputs},
                               {job->w_hh + g * hidden * hidden, b_hh, f.h_rows, hidden}};
        if (job->is_lstm) {
            gate_rows(terms, 2, hidden, s.batch, f.gates + g * padded, s.row);
        } else if (g < 2) {
            gate_rows(terms, 2, hidden, s.batch, f.gates + (1 + g) * padded, s.row);
        } else { /* the candidate's two parts stay apart */
            gate_rows(terms, 1, hidden, s.batch, f.gates, s.row);
            gate_rows(terms + 1, 1, hidden, s.batch, f.gates + 3 * padded, s.row);
        }
    }

    const float nothing[4 * LANES] = {0};
    for (int64_t b = 0; b < s.batch; b++) {
        if (job->is_lstm) copy_padded(f.cell, job->c0 + b * hidden, hidden, padded);
        for (int64_t u = 0; u < padded; u += LANES) {
            float *gate = f.gates + b * s.row + u, *h = job->y + b * hidden + u;
            if (job->is_lstm) {
                const float *c_before = job->resets && job->resets[b] ? f.reset_c + u : f.cell + u;
                lstm_gates(gate, padded, nothing, c_before, f.cell + u, h, hidden - u, 0);
            } else {
                gru_gates(gate, padded, nothing, gate + 3 * padded, f.h_rows[b] + u, h, hidden - u, 0);
            }
        }
        if (job->is_lstm) copy_unpadded(job->c_n + b * hidden, f.cell, hidden);
    }
    holdfast_give_back(OF_ONE_PART, block);
    return 0;
}

#endif
