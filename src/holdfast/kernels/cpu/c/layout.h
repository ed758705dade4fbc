/* How the gates of a cell lie in memory, and where a call keeps its scratch.
 *
 * A row of gates is 4 slots of `padded` floats. LSTM: i, f, g, o. GRU: n, r, z, hn, where hn is the recurrent part of
 * the candidate: the input's product fills slots 0 to 2, the state's product slots 1 to 3. */
#ifndef HOLDFAST_LAYOUT_H
#define HOLDFAST_LAYOUT_H

#include <stdlib.h>

#include "job.h"
#include "product.h"

typedef struct {
    int64_t gates;             /* of torch's weights: 4 or 3 */
    int64_t x_gate[4];         /* torch's gate in slot s of the input's product */
    int64_t h_gate[4];         /* torch's gate in slot h_slot + s of the state's product */
    int64_t h_slot;
} Cell;

static const Cell lstm_cell = {4, {0, 1, 2, 3}, {0, 1, 2, 3}, 0};
static const Cell gru_cell = {3, {2, 0, 1, 0}, {0, 1, 2, 0}, 1};

typedef struct {
    int64_t steps, batch, inputs, hidden, units; /* units: vectors of hidden units, padded / LANES */
    int64_t padded, padded_inputs, row;          /* row: floats in a row of gates, 4 * padded */
    Cell cell;
} Sizes;

INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE Sizes sizes_of(const Job *job) {
    Sizes s = {job->steps, job->batch, job->inputs, job->hidden, 0, 0, 0, 0, job->is_lstm ? lstm_cell : gru_cell};
    s.padded = round_up(s.hidden, LANES);
    s.padded_inputs = round_up(s.inputs, LANES);
    s.units = s.padded / LANES;
    s.row = 4 * s.padded;
    return s;
}

/* One block of memory, divided in order; with base 0 it is only measured. */
typedef struct {
    uintptr_t base;
    size_t used;
} Arena;

INLINE void *take(Arena *arena, size_t bytes) {
    uintptr_t address = arena->base + arena->used;
    arena->used += (bytes + 127) / 64 * 64; /* a cache line apart, and never the same address twice */
    return arena->base ? (void *)address : NULL;
}
INLINE float *take_floats(Arena *arena, int64_t count) { return take(arena, (size_t)count * sizeof(float)); }

INLINE void zero(float *p, int64_t count) { memset(p, 0, (size_t)count * sizeof(float)); }

/* out [padded] = from [count], zeros after it; from NULL is all zeros. */
INLINE void copy_padded(float *out, const float *from, int64_t count, int64_t padded) {
    for (int64_t u = 0; u < padded; u += LANES) store(out + u, from ? load_first(from + u, count - u) : splat(0.0f));
}
/* out [count] = the first `count` of from [padded]. */
INLINE void copy_unpadded(float *out, const float *from, int64_t count) {
    for (int64_t u = 0; u < count; u += LANES) store_first(out + u, load(from + u), count - u);
}

/* Rows go through time in chunks of about CHUNK_ROWS, so that a chunk's gates stay in cache between the products, and in
 * groups of at most GROUP_ROWS that go side by side. */
#define CHUNK_ROWS 96
#define GROUP_ROWS 64

/* At least the rows of a chunk, for any group of at most `rows`. */
INLINE int64_t chunk_bound(int64_t rows) { return rows > CHUNK_ROWS ? rows : CHUNK_ROWS; }

#endif
