/* The products of the recurrence as tiles that stay in registers, and the packing of what they read.
 *
 * A tile is up to MAX_ROWS rows x up to 4 vectors of columns. Its right-hand side is a *panel*: for each of `depth`
 * values of the summed index, the tile's columns side by side. Rows on the left are given by address, one each, so that
 * a reset row can point at its reset value instead of being copied. */
#ifndef HOLDFAST_PRODUCT_H
#define HOLDFAST_PRODUCT_H

#include "vector.h"

#define PANEL (4 * LANES)

typedef void (*Tile)(int64_t depth, const float *const *rows, const float *panel, float *result);

/* result[r][v] = sum over k of rows[r][k] * panel[k][v]. Long sums are made of sums of BLOCK terms, which keeps rounding
 * errors small. SPLIT sums run side by side where one row alone would wait for each addition. */
#define BLOCK 256
#define TILE(ROWS, WIDTH, SPLIT)                                                                                    \
    static void tile_##ROWS##_##WIDTH(int64_t depth, const float *const *rows, const float *panel, float *result) { \
        const float *row[ROWS];                                                                                     \
        UNROLL for (int r = 0; r < ROWS; r++) row[r] = rows[r];                                                     \
        for (int64_t k = 0, end = 0; end < depth;) {                                                                \
            const int first = k == 0;                                                                               \
            end = depth - k > BLOCK ? k + BLOCK : depth;                                                            \
            vec sum[SPLIT][ROWS][WIDTH];                                                                            \
            UNROLL for (int s = 0; s < SPLIT; s++) UNROLL for (int r = 0; r < ROWS; r++)                            \
                UNROLL for (int v = 0; v < WIDTH; v++) sum[s][r][v] = splat(0.0f);                                  \
            for (; k + SPLIT <= end; k += SPLIT) {                                                                  \
                UNROLL for (int s = 0; s < SPLIT; s++) {                                                            \
                    vec left[ROWS];                                                                                 \
                    UNROLL for (int r = 0; r < ROWS; r++) left[r] = splat(row[r][k + s]);                           \
                    UNROLL for (int v = 0; v < WIDTH; v++) {                                                        \
                        vec right = load(panel + ((k + s) * WIDTH + v) * LANES);                                    \
                        UNROLL for (int r = 0; r < ROWS; r++) sum[s][r][v] += left[r] * right;                      \
                    }                                                                                               \
                }                                                                                                   \
            }                                                                                                       \
            for (; k < end; k++)                                                                                    \
                UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < WIDTH; v++)                        \
                    sum[0][r][v] += splat(row[r][k]) * load(panel + (k * WIDTH + v) * LANES);                       \
            UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < WIDTH; v++) {                          \
                float *to = result + (r * WIDTH + v) * LANES;                                                       \
                vec total = sum[0][r][v];                                                                           \
                UNROLL for (int s = 1; s < SPLIT; s++) total += sum[s][r][v];                                       \
                store(to, first ? total : load(to) + total);                                                        \
            }                                                                                                       \
        }                                                                                                           \
    }

#define TILES(WIDTH) TILE(1, WIDTH, 2) TILE(2, WIDTH, 1) TILE(3, WIDTH, 1)
#define TILES_6(WIDTH) TILE(4, WIDTH, 1) TILE(5, WIDTH, 1) TILE(6, WIDTH, 1)
TILES(1) TILES(2) TILES(3) TILES(4)
#if MAX_ROWS == 6
TILES_6(1) TILES_6(2) TILES_6(3) TILES_6(4)
#define TILE_ROW(WIDTH)                                                                     \
    {tile_1_##WIDTH, tile_2_##WIDTH, tile_3_##WIDTH, tile_4_##WIDTH, tile_5_##WIDTH, tile_6_##WIDTH}
#else
#define TILE_ROW(WIDTH) {tile_1_##WIDTH, tile_2_##WIDTH, tile_3_##WIDTH}
#endif
static const Tile tiles[4][MAX_ROWS] = {TILE_ROW(1), TILE_ROW(2), TILE_ROW(3), TILE_ROW(4)};

/* Rows in blocks of nearly equal size, at most MAX_ROWS each: block i is [block_start(i), block_start(i + 1)). */
INLINE int64_t block_count(int64_t rows) { return (rows + MAX_ROWS - 1) / MAX_ROWS; }
INLINE int64_t block_start(int64_t rows, int64_t i) { return rows * i / block_count(rows); }

/* A sum of outer products: out[r][v] (+)= sum over k of columns[k][r] * panel[k][v], OUTER_ROWS columns at a time. */
#define OUTER(WIDTH)                                                                                               \
    static void outer_##WIDTH(int64_t depth, const float *columns, int64_t stride, const float *panel, float *out,  \
                              int64_t out_stride, int add) {                                                       \
        vec sum[OUTER_ROWS][WIDTH];                                                                                \
        UNROLL for (int r = 0; r < OUTER_ROWS; r++) UNROLL for (int v = 0; v < WIDTH; v++) sum[r][v] = splat(0.0f); \
        for (int64_t k = 0; k < depth; k++, columns += stride) {                                                   \
            vec left[OUTER_ROWS];                                                                                  \
            UNROLL for (int r = 0; r < OUTER_ROWS; r++) left[r] = splat(columns[r]);                               \
            UNROLL for (int v = 0; v < WIDTH; v++) {                                                               \
                vec right = load(panel + (k * WIDTH + v) * LANES);                                                 \
                UNROLL for (int r = 0; r < OUTER_ROWS; r++) sum[r][v] += left[r] * right;                          \
            }                                                                                                      \
        }                                                                                                          \
        UNROLL for (int r = 0; r < OUTER_ROWS; r++) UNROLL for (int v = 0; v < WIDTH; v++) {                       \
            float *to = out + r * out_stride + v * LANES;                                                          \
            store(to, add ? load(to) + sum[r][v] : sum[r][v]);                                                     \
        }                                                                                                          \
    }
OUTER(1) OUTER(2) OUTER(3) OUTER(4)
static void (*const outers[4])(int64_t, const float *, int64_t, const float *, float *, int64_t, int) = {
    outer_1, outer_2, outer_3, outer_4};

/* Columns in panels of 4 vectors, the last one narrower. */
INLINE int64_t panel_vectors(int64_t padded, int64_t first_column) {
    int64_t left = (padded - first_column) / LANES;
    return left < 4 ? left : 4;
}

/* out[k][v] = rows[k][first_column + v], zeros beyond `columns`: a panel of `width` vectors from rows by address. */
INLINE void pack_panel(float *out, const float *const *rows, int64_t depth, int64_t first_column, int64_t columns,
                       int64_t width) {
    for (int64_t k = 0; k < depth; k++)
        for (int64_t v = 0; v < width; v++) {
            int64_t column = first_column + v * LANES;
            store(out + (k * width + v) * LANES, load_first(rows[k] + column, columns - column));
        }
}

/* out[k][lane] = rows[lane][k] for `count` rows, zeros for the other lanes; out advances by `out_stride` per k. Where
 * the compiler can shuffle, squares of 4 x 4 are turned in registers. */
INLINE void pack_transposed(float *out, int64_t out_stride, const float *rows, int64_t row_stride, int64_t count,
                            int64_t depth) {
    int64_t squares = 0;
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
    typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));
    squares = count < LANES ? 0 : depth / 4 * 4;
    for (int64_t k = 0; k < squares; k += 4)
        for (int64_t lane = 0; lane < LANES; lane += 4) {
            const float *from = rows + lane * row_stride + k;
            float *to = out + k * out_stride + lane;
            quad a = *(const quad *)from, b = *(const quad *)(from + row_stride);
            quad c = *(const quad *)(from + 2 * row_stride), d = *(const quad *)(from + 3 * row_stride);
            quad ab01 = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab23 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
            quad cd01 = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd23 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
            *(quad *)to = __builtin_shufflevector(ab01, cd01, 0, 1, 4, 5);
            *(quad *)(to + out_stride) = __builtin_shufflevector(ab01, cd01, 2, 3, 6, 7);
            *(quad *)(to + 2 * out_stride) = __builtin_shufflevector(ab23, cd23, 0, 1, 4, 5);
            *(quad *)(to + 3 * out_stride) = __builtin_shufflevector(ab23, cd23, 2, 3, 6, 7);
        }
#endif
#endif
    for (int64_t lane = 0; lane < LANES; lane++)
        for (int64_t k = squares; k < depth; k++)
            out[k * out_stride + lane] = lane < count ? rows[lane * row_stride + k] : 0.0f;
}

/* out[r] (+)= left[r] W for rows given by address; columns beyond `columns` are not touched. `weights` are panels of
 * columns, each [depth][vectors][LANES]; `out` NULL: rows of `out_stride` from `out_first` on. Every second time panels
 * are best read in reverse: what was read last is still in cache. */
INLINE void product_rows(float *result, const float *const *left, int64_t depth, const float *weights, int64_t columns,
                         int64_t padded, float *const *out, float *out_first, int64_t out_stride, int64_t rows,
                         const int add, const int reverse) {
    const int64_t last = (padded - 1) / PANEL * PANEL;
    for (int64_t done = 0; done < padded; done += PANEL) {
        const int64_t column = reverse ? last - done : done;
        const int64_t width = panel_vectors(padded, column);
        const float *panel = weights + column * depth;
        for (int64_t i = 0; i < block_count(rows); i++) {
            int64_t first = block_start(rows, i), count = block_start(rows, i + 1) - first;
            tiles[width - 1][count - 1](depth, left + first, panel, result);
            for (int64_t r = 0; r < count; r++)
                for (int64_t v = 0; v < width; v++) {
                    int64_t at = column + v * LANES;
                    float *to = (out ? out[first + r] : out_first + (first + r) * out_stride) + at;
                    vec sum = load(result + (r * width + v) * LANES);
                    store_first(to, add ? load(to) + sum : sum, columns - at);
                }
        }
    }
}

/* Rows by address as panels of columns, for `outer_products`: out is rows * padded. */
static void pack_panels(float *out, const float *const *from, int64_t rows, int64_t columns, int64_t padded) {
    for (int64_t column = 0; column < padded; column += PANEL)
        pack_panel(out + column * rows, from, rows, column, columns, panel_vectors(padded, column));
}

/* out [left_columns][padded] (+)= sum over rows of left^T right, whose right side is packed. */
static void outer_products(const float *panels, const float *left, int64_t stride, int64_t left_columns, int64_t rows,
                           int64_t padded, float *out, int add) {
    /* a cache line of the left side meets every panel before the next line is fetched */
    for (int64_t line = 0; line < left_columns; line += LANES)
        for (int64_t column = 0; column < padded; column += PANEL)
            for (int64_t g = line; g < line + LANES; g += OUTER_ROWS)
                outers[panel_vectors(padded, column) - 1](rows, left + g, stride, panels + column * rows,
                                                          out + g * padded + column, padded, add);
}

#endif
