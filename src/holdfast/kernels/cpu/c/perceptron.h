/* Linear layers with activations, forward and backward. Rows go through all layers in chunks, so that the output
 * of a layer is still in cache for the next. */
#ifndef HOLDFAST_PERCEPTRON_H
#define HOLDFAST_PERCEPTRON_H

#include "step.h"

INLINE vec activate(vec x, int64_t activation) {
    if (activation == TANH) return tanh_(x);
    if (activation == RELU) return (vec)(~(ivec)(x < splat(0.0f)) & (ivec)x); /* NaN stays */
    return x;
}
/* The gradient d taken through the activation whose output is y. */
INLINE vec through(vec d, vec y, int64_t activation) {
    if (activation == TANH) return d * (splat(1.0f) - y * y);
    if (activation == RELU) return (vec)((ivec)(y > splat(0.0f)) & (ivec)d);
    return d;
}

typedef struct {
    const Perceptron *job;
    float **dw, **db; /* backward: [parts * layers] sums, [padded out][padded in] and [padded out] */
    int failed;
} PerceptronCall;

typedef struct {
    float *w[MAX_LAYERS];    /* panels of columns */
    const float **rows;      /* [longest chunk or layer] */
    float *panels, *d[2];    /* backward: [chunk][widest] */
    float *result;
} PerceptronScratch;

INLINE int64_t widest(const Perceptron *job) {
    int64_t most = 0;
    for (int64_t l = 0; l <= job->layers; l++) most = job->sizes[l] > most ? job->sizes[l] : most;
    return round_up(most, LANES);
}

static void perceptron_scratch(PerceptronScratch *f, Arena *arena, const Perceptron *job, int backward) {
    const int64_t most = widest(job);
    for (int64_t l = 0; l < job->layers; l++) {
        const int64_t in = job->sizes[l], out = job->sizes[l + 1];
        f->w[l] = take_floats(arena, backward ? round_up(in, LANES) * out : in * round_up(out, LANES));
    }
    f->rows = take(arena, (size_t)(most > CHUNK_ROWS ? most : CHUNK_ROWS) * sizeof(float *));
    f->result = take_floats(arena, MAX_ROWS * PANEL);
    if (!backward) return;
    f->panels = take_floats(arena, CHUNK_ROWS * most);
    for (int i = 0; i < 2; i++) f->d[i] = take_floats(arena, CHUNK_ROWS * (most + LANES));
}

/* The block is NULL when there is no memory. */
static Block place_perceptron(PerceptronScratch *f, const Perceptron *job, int backward) {
    Arena arena = {0, 0};
    perceptron_scratch(f, &arena, job, backward);
    Block block = holdfast_borrow(OF_ONE_PART, arena.used);
    arena = (Arena){(uintptr_t)block.memory, 0};
    if (block.memory) perceptron_scratch(f, &arena, job, backward);
    return block;
}

/* The input of row n of layer l. */
INLINE const float *input_row(const Perceptron *job, int64_t l, int64_t n) {
    return (l ? job->out[l - 1] : job->x) + n * job->sizes[l];
}

/* Few rows: the weights in torch's layout. */
static void thin_layer(const Perceptron *job, PerceptronScratch *f, int64_t l, int64_t from, int64_t rows) {
    const int64_t size = job->sizes[l + 1];
    float *out = job->out[l] + from * size;
    for (int64_t r = 0; r < rows; r++) f->rows[r] = input_row(job, l, from + r);
    const Term term = {job->w[l], job->b[l], f->rows, job->sizes[l]};
    gate_rows(&term, 1, size, rows, out, size);
    for (int64_t i = 0; job->activation[l] != IDENTITY && i < rows * size; i += LANES)
        store_first(out + i, activate(load_first(out + i, rows * size - i), job->activation[l]), rows * size - i);
}

static void wide_layer(const Perceptron *job, PerceptronScratch *f, int64_t l, int64_t from, int64_t rows) {
    const int64_t in = job->sizes[l], size = job->sizes[l + 1], padded = round_up(size, LANES);
    for (int64_t r = 0; r < rows; r++) f->rows[r] = input_row(job, l, from + r);
    for (int64_t column = 0; column < padded; column += PANEL) {
        const int64_t width = panel_vectors(padded, column);
        for (int64_t i = 0; i < block_count(rows); i++) {
            const int64_t first = block_start(rows, i), count = block_start(rows, i + 1) - first;
            tiles[width - 1][count - 1](in, f->rows + first, f->w[l] + column * in, f->result);
            for (int64_t r = 0; r < count; r++)
                for (int64_t v = 0; v < width; v++) {
                    const int64_t at = column + v * LANES;
                    vec sum = load(f->result + (r * width + v) * LANES) + load_first(job->b[l] + at, size - at);
                    float *to = job->out[l] + (from + first + r) * size + at;
                    store_first(to, activate(sum, job->activation[l]), size - at);
                }
        }
    }
}

static void perceptron_forward_part(void *context, int64_t part) {
    PerceptronCall *call = context;
    const Perceptron *job = call->job;
    const int64_t from = job->rows * part / job->threads, to = job->rows * (part + 1) / job->threads;
    const int thin = to - from < PACKED_ROWS;
    PerceptronScratch f;
    Block block = place_perceptron(&f, job, 0);
    if (!block.memory) {
        call->failed = 1;
        return;
    }
    unsigned int mode = flush_denormals();
    for (int64_t l = 0; !thin && l < job->layers; l++) {
        const int64_t in = job->sizes[l], size = job->sizes[l + 1], padded = round_up(size, LANES);
        for (int64_t at = 0; at < padded; at += LANES) {
            const int64_t column = at / PANEL * PANEL, width = panel_vectors(padded, column);
            pack_transposed(f.w[l] + column * in + at - column, width * LANES, job->w[l] + at * in, in, size - at, in);
        }
    }
    for (int64_t row = from, rows; row < to; row += rows) {
        rows = smaller(CHUNK_ROWS, to - row);
        for (int64_t l = 0; l < job->layers; l++)
            if (thin) thin_layer(job, &f, l, row, rows);
            else wide_layer(job, &f, l, row, rows);
    }
    restore_denormals(mode);
    holdfast_give_back(OF_ONE_PART, block);
}

static int perceptron_forward(const Perceptron *job) {
    PerceptronCall call = {.job = job};
    holdfast_parallel(perceptron_forward_part, &call, job->threads);
    return call.failed;
}

/* The gradients of the rows of one chunk, from the last layer to the first. */
static void backward_chunk(const PerceptronCall *call, PerceptronScratch *f, int64_t part, int64_t from, int64_t rows) {
    const Perceptron *job = call->job;
    const int64_t stride = widest(job) + LANES; /* no power of two, because cache lines would collide */
    for (int64_t l = job->layers - 1, now = 0; l >= 0; l--, now = !now) {
        const int64_t in = job->sizes[l], padded_in = round_up(in, LANES), size = job->sizes[l + 1];
        float *d = f->d[now], *dw = call->dw[part * job->layers + l], *db = call->db[part * job->layers + l];
        for (int64_t u = 0; u < size; u += LANES) {
            vec sum = load(db + u);
            for (int64_t r = 0; r < rows; r++) {
                const int64_t at = (from + r) * size + u;
                float *to = d + r * stride + u;
                vec arrived = l == job->layers - 1 ? load_first(job->d_out + at, size - u) : load(to);
                vec gradient = through(arrived, load_first(job->out[l] + at, size - u), job->activation[l]);
                store(to, gradient);
                sum += gradient;
            }
            store(db + u, sum);
        }
        for (int64_t r = 0; r < rows; r++) f->rows[r] = input_row(job, l, from + r);
        pack_panels(f->panels, f->rows, rows, in, padded_in);
        outer_products(f->panels, d, stride, round_up(size, LANES), rows, padded_in, dw, 1);
        if (l == 0 && !job->dx) continue;
        for (int64_t r = 0; r < rows; r++) f->rows[r] = d + r * stride;
        product_rows(f->result, f->rows, size, f->w[l], l ? padded_in : in, padded_in, NULL,
                     l ? f->d[!now] : job->dx + from * in, l ? stride : in, rows, 0, 0);
    }
}

static void perceptron_backward_part(void *context, int64_t part) {
    PerceptronCall *call = context;
    const Perceptron *job = call->job;
    const int64_t from = job->rows * part / job->threads, to = job->rows * (part + 1) / job->threads;
    PerceptronScratch f;
    Block block = place_perceptron(&f, job, 1);
    if (!block.memory) {
        call->failed = 1;
        return;
    }
    unsigned int mode = flush_denormals();
    for (int64_t l = 0; l < job->layers; l++) {
        const int64_t in = job->sizes[l], padded_in = round_up(in, LANES), size = job->sizes[l + 1];
        zero(call->dw[part * job->layers + l], round_up(size, LANES) * padded_in);
        zero(call->db[part * job->layers + l], round_up(size, LANES));
        if (l == 0 && !job->dx) continue;
        for (int64_t j = 0; j < size; j++) f.rows[j] = job->w[l] + j * in;
        for (int64_t column = 0; column < padded_in; column += PANEL)
            pack_panel(f.w[l] + column * size, f.rows, size, column, in, panel_vectors(padded_in, column));
    }
    for (int64_t row = from, rows; row < to; row += rows) {
        rows = smaller(CHUNK_ROWS, to - row);
        backward_chunk(call, &f, part, row, rows);
    }
    restore_denormals(mode);
    holdfast_give_back(OF_ONE_PART, block);
}

static void perceptron_sums(PerceptronCall *call, Arena *arena) {
    const Perceptron *job = call->job;
    const int64_t count = job->threads * job->layers;
    call->dw = take(arena, (size_t)count * sizeof(float *));
    call->db = take(arena, (size_t)count * sizeof(float *));
    for (int64_t i = 0; i < count; i++) {
        const int64_t l = i % job->layers, out = round_up(job->sizes[l + 1], LANES);
        float *dw = take_floats(arena, out * round_up(job->sizes[l], LANES)), *db = take_floats(arena, out);
        if (arena->base) call->dw[i] = dw, call->db[i] = db;
    }
}

static int perceptron_backward(const Perceptron *job) {
    PerceptronCall call = {.job = job};
    Arena arena = {0, 0};
    perceptron_sums(&call, &arena);
    Block block = holdfast_borrow(SHARED_BY_PARTS, arena.used);
    if (!block.memory) return 1;
    arena = (Arena){(uintptr_t)block.memory, 0};
    perceptron_sums(&call, &arena);
    holdfast_parallel(perceptron_backward_part, &call, job->threads);
    for (int64_t l = 0; !call.failed && l < job->layers; l++) {
        const int64_t in = job->sizes[l], padded_in = round_up(in, LANES), size = job->sizes[l + 1];
        for (int64_t j = 0; j < size; j++)
            for (int64_t c = 0; c < in; c += LANES) {
                vec sum = splat(0.0f);
                for (int64_t part = 0; part < job->threads; part++)
                    sum += load(call.dw[part * job->layers + l] + j * padded_in + c);
                store_first(job->dw[l] + j * in + c, sum, in - c);
            }
        for (int64_t j = 0; j < size; j++) {
            job->db[l][j] = 0.0f;
            for (int64_t part = 0; part < job->threads; part++) job->db[l][j] += call.db[part * job->layers + l][j];
        }
    }
    holdfast_give_back(SHARED_BY_PARTS, block);
    return call.failed;
}

#endif
