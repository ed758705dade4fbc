/* Linear recurrences h[t] = a[t] h[t-1] + b[t] over whole sequences, forward and backward.
 *
 * One pass over the arrays each way, vectorized over channels, with threads over batch rows. A reset is a choice of the
 * pointer that a row's previous state is read from, so that nothing of the old state is touched. A step alone is a
 * sequence of length 1 and gives the same bits. */
#ifndef HOLDFAST_LINEAR_H
#define HOLDFAST_LINEAR_H

#include "layout.h"

/* Rows that go through time together, so that their states stay in the first-level cache. */
#define LINEAR_GROUP_FLOATS 4096
/* Sums over rows and steps are kept in pieces of about this many terms, so that rounding errors do not add up. */
#define TERMS_PER_SUM 64

typedef struct {
    const LinearRecurrence *job;
    int64_t width;     /* floats in a row of the state */
    const float *zeros; /* [width] */
    float *da, *d_fill; /* [threads, width] sums of each part; NULL where not needed */
    int failed;
} Linear;

INLINE int starts_over(const LinearRecurrence *job, int64_t t, int64_t row) {
    return job->resets && job->resets[t * job->batch + row];
}

/* The state that row `row` enters step t with. */
INLINE const float *entered_with(const Linear *call, int64_t t, int64_t row) {
    const LinearRecurrence *job = call->job;
    if (!job->detach_at_reset && starts_over(job, t, row)) return job->fill ? job->fill : call->zeros;
    return t == 0 ? job->h0 + row * call->width : job->h + ((t - 1) * job->batch + row) * call->width;
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

INLINE void linear_row_forward(const Linear *call, int64_t t, int64_t row, const int form) {
    const LinearRecurrence *job = call->job;
    const int64_t C = job->channels, at = (t * job->batch + row);
    const float *prev = entered_with(call, t, row);
    float *out = job->h + at * call->width;
    if (form == GATED) {
        const float *gate = job->b + at * 2 * C, *candidate = gate + C;
        for (int64_t u = 0; u < C; u += LANES) {
            const vec z = sigmoid(load_first(gate + u, C - u)), h = load_first(prev + u, C - u);
            store_first(out + u, h + z * (load_first(candidate + u, C - u) - h), C - u);
        }
        return;
    }
    const float *a = job->a + (job->a_per_channel ? 0 : at * call->width), *b = job->b + at * call->width;
    for (int64_t u = 0; u < C; u += LANES) {
        const int64_t left = C - u;
        const vec a_re = load_first(a + u, left), h_re = load_first(prev + u, left), b_re = load_first(b + u, left);
        if (form == REAL) {
            store_first(out + u, a_re * h_re + b_re, left);
        } else {
            const vec a_im = load_first(a + C + u, left), h_im = load_first(prev + C + u, left);
            store_first(out + u, a_re * h_re - a_im * h_im + b_re, left);
            store_first(out + C + u, a_re * h_im + a_im * h_re + load_first(b + C + u, left), left);
        }
    }
}

static void linear_forward_part(void *context, int64_t part) {
    Linear *call = context;
    const LinearRecurrence *job = call->job;
    const int64_t from = job->batch * part / job->threads, to = job->batch * (part + 1) / job->threads;
    const int64_t group = 1 + LINEAR_GROUP_FLOATS / call->width;
    unsigned int mode = flush_denormals();
    for (int64_t first = from; first < to; first += group) {
        const int64_t last = smaller(first + group, to);
        for (int64_t t = 0; t < job->steps; t++)
            for (int64_t row = first; row < last; row++) {
                if (job->form == GATED) linear_row_forward(call, t, row, GATED);
                else if (job->form == COMPLEX) linear_row_forward(call, t, row, COMPLEX);
                else linear_row_forward(call, t, row, REAL);
            }
    }
    const float *last = job->steps ? job->h + (job->steps - 1) * job->batch * call->width : job->h0;
    const size_t bytes = (size_t)((to - from) * call->width) * sizeof(float);
    memcpy(job->h_n + from * call->width, last + from * call->width, bytes);
    restore_denormals(mode);
}

INLINE int64_t linear_width(const LinearRecurrence *job) { return (job->form == COMPLEX ? 2 : 1) * job->channels; }

static int linear_forward(const LinearRecurrence *job) {
    Linear call = {.job = job, .width = linear_width(job)};
    Block block = holdfast_borrow(SHARED_BY_PARTS, (size_t)round_up(call.width, 16) * sizeof(float));
    if (!block.memory) return 1;
    zero(block.memory, call.width);
    call.zeros = block.memory;
    holdfast_parallel(linear_forward_part, &call, job->threads);
    holdfast_give_back(SHARED_BY_PARTS, block);
    return 0;
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

/* carry [width]: in, the gradient of the state after step t from later steps; out, that of the state before it. */
INLINE void linear_row_backward(const Linear *call, int64_t t, int64_t row, float *carry, float *da, const int form) {
    const LinearRecurrence *job = call->job;
    const int64_t C = job->channels, at = (t * job->batch + row);
    const float *prev = entered_with(call, t, row), *dh = job->dh ? job->dh + at * call->width : NULL;
    if (form == GATED) {
        const float *gate = job->b + at * 2 * C, *candidate = gate + C;
        float *d_gate = job->db + at * 2 * C, *d_candidate = d_gate + C;
        for (int64_t u = 0; u < C; u += LANES) {
            const int64_t left = C - u;
            vec g = load_first(carry + u, left);
            if (dh) g += load_first(dh + u, left);
            const vec z = sigmoid(load_first(gate + u, left)), gz = g * z;
            const vec difference = load_first(candidate + u, left) - load_first(prev + u, left);
            store_first(d_gate + u, gz * (splat(1.0f) - z) * difference, left);
            store_first(d_candidate + u, gz, left);
            store_first(carry + u, g - gz, left);
        }
        return;
    }
    const int per_channel = (int)job->a_per_channel;
    const float *a = job->a + (per_channel ? 0 : at * call->width);
    float *db = job->db + at * call->width;
    for (int64_t u = 0; u < C; u += LANES) {
        const int64_t left = C - u;
        const vec a_re = load_first(a + u, left), h_re = load_first(prev + u, left);
        vec g_re = load_first(carry + u, left);
        if (dh) g_re += load_first(dh + u, left);
        vec da_re = g_re * h_re;
        store_first(db + u, g_re, left);
        if (form == REAL) {
            store_first(carry + u, a_re * g_re, left);
        } else { /* conjugates: carry = conj(a) g, da = g conj(h) */
            const vec a_im = load_first(a + C + u, left), h_im = load_first(prev + C + u, left);
            vec g_im = load_first(carry + C + u, left);
            if (dh) g_im += load_first(dh + C + u, left);
            store_first(db + C + u, g_im, left);
            store_first(carry + u, a_re * g_re + a_im * g_im, left);
            store_first(carry + C + u, a_re * g_im - a_im * g_re, left);
            da_re += g_im * h_im;
            vec da_im = g_im * h_re - g_re * h_im;
            if (da && per_channel) da_im += load_first(da + C + u, left);
            if (da) store_first(da + C + u, da_im, left);
        }
        if (da && per_channel) da_re += load_first(da + u, left);
        if (da) store_first(da + u, da_re, left);
    }
}

INLINE void add_to(float *sum, const float *part, int64_t count) {
    for (int64_t u = 0; u < count; u += LANES)
        store_first(sum + u, load_first(sum + u, count - u) + load_first(part + u, count - u), count - u);
}
INLINE void flush_sum(float *sum, float *piece, int64_t count) {
    add_to(sum, piece, count);
    zero(piece, count);
}

static void linear_backward_part(void *context, int64_t part) {
    Linear *call = context;
    const LinearRecurrence *job = call->job;
    const int64_t from = job->batch * part / job->threads, to = job->batch * (part + 1) / job->threads;
    const int64_t W = call->width, group = smaller(1 + LINEAR_GROUP_FLOATS / W, to - from);
    Block block = holdfast_borrow(OF_ONE_PART, (size_t)round_up((group + 2) * W, 16) * sizeof(float));
    if (!block.memory) {
        call->failed = 1;
        return;
    }
    float *carries = block.memory, *da = carries + group * W, *d_fill = da + W;
    float *da_sum = call->da ? call->da + part * W : NULL, *d_fill_sum = call->d_fill ? call->d_fill + part * W : NULL;
    if (da_sum) zero(da_sum, W), zero(da, W);
    if (d_fill_sum) zero(d_fill_sum, W), zero(d_fill, W);
    unsigned int mode = flush_denormals();
    int64_t terms = 0, fills = 0;
    for (int64_t first = from; first < to; first += group) {
        const int64_t rows = smaller(group, to - first);
        if (job->dh_n) memcpy(carries, job->dh_n + first * W, (size_t)(rows * W) * sizeof(float));
        else zero(carries, rows * W);
        for (int64_t t = job->steps - 1; t >= 0; t--)
            for (int64_t i = 0; i < rows; i++) {
                const int64_t row = first + i;
                float *carry = carries + i * W;
                float *da_here = da_sum ? da : job->da ? job->da + (t * job->batch + row) * W : NULL;
                if (job->form == GATED) linear_row_backward(call, t, row, carry, da_here, GATED);
                else if (job->form == COMPLEX) linear_row_backward(call, t, row, carry, da_here, COMPLEX);
                else linear_row_backward(call, t, row, carry, da_here, REAL);
                if (da_sum && ++terms % TERMS_PER_SUM == 0) flush_sum(da_sum, da, W);
                if (!starts_over(job, t, row)) continue;
                if (d_fill_sum) add_to(d_fill, carry, W);
                if (d_fill_sum && ++fills % TERMS_PER_SUM == 0) flush_sum(d_fill_sum, d_fill, W);
                zero(carry, W);
            }
        if (job->dh0) memcpy(job->dh0 + first * W, carries, (size_t)(rows * W) * sizeof(float));
    }
    if (da_sum) flush_sum(da_sum, da, W);
    if (d_fill_sum) flush_sum(d_fill_sum, d_fill, W);
    restore_denormals(mode);
    holdfast_give_back(OF_ONE_PART, block);
}

static int linear_backward(const LinearRecurrence *job) {
    Linear call = {.job = job, .width = linear_width(job)};
    const int64_t W = call.width, sums = job->threads * W;
    Block block = holdfast_borrow(SHARED_BY_PARTS, (size_t)round_up(W + 2 * sums, 16) * sizeof(float));
    if (!block.memory) return 1;
    float *memory = block.memory;
    zero(memory, W);
    call.zeros = memory;
    if (job->da && job->a_per_channel) call.da = memory + W;
    if (job->d_fill) call.d_fill = memory + W + sums;
    holdfast_parallel(linear_backward_part, &call, job->threads);
    if (call.da) zero(job->da, W);
    if (call.d_fill) zero(job->d_fill, W);
    for (int64_t part = 0; part < job->threads && !call.failed; part++) {
        if (call.da) add_to(job->da, call.da + part * W, W);
        if (call.d_fill) add_to(job->d_fill, call.d_fill + part * W, W);
    }
    holdfast_give_back(SHARED_BY_PARTS, block);
    return call.failed;
}

#endif
