/* Runs the native kernel over odd sizes with arrays of exactly the size it was promised, for tools that watch memory and
 * threads. Numbers are checked elsewhere; here every result only has to be finite. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "job.h"

const char *holdfast_choose(const char *name);
int64_t holdfast_lanes(void);
int holdfast_forward(const Job *job), holdfast_backward(const Job *job), holdfast_step(const Job *job);

static float *numbers(int64_t count) {
    float *p = malloc((size_t)count * sizeof(float) + (count == 0));
    for (int64_t i = 0; i < count; i++) p[i] = (float)(rand() % 2001 - 1000) / 2000.0f;
    return p;
}

static void all_finite(const char *what, const float *p, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!isfinite(p[i])) {
            fprintf(stderr, "%s[%lld] is not finite\n", what, (long long)i);
            exit(1);
        }
}

static void succeed(int status) {
    if (status) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
}

static void run(int64_t T, int64_t B, int64_t I, int64_t H, int lstm, int cut, int fills, int bias, double p, int threads) {
    const int64_t G = lstm ? 4 : 3, padded = (H + holdfast_lanes() - 1) / holdfast_lanes() * holdfast_lanes();
    float *owned[32];
    int count = 0;
#define NEW(n) (owned[count++] = numbers(n))
    uint8_t *resets = malloc((size_t)(T * B) + 1);
    for (int64_t i = 0; i < T * B; i++) resets[i] = rand() < p * RAND_MAX;
    Job job = {.steps = T, .batch = B, .inputs = I, .hidden = H, .is_lstm = lstm, .cut = cut, .threads = threads};
    job.x = NEW(T * B * I);
    job.h0 = NEW(B * H);
    job.c0 = lstm ? NEW(B * H) : NULL;
    job.resets = p < 0 ? NULL : resets;
    job.fill_h = fills ? NEW(H) : NULL;
    job.fill_c = fills && lstm ? NEW(H) : NULL;
    job.w_ih = NEW(G * H * I);
    job.w_hh = NEW(G * H * H);
    job.b_ih = bias ? NEW(G * H) : NULL;
    job.b_hh = bias ? NEW(G * H) : NULL;
    job.y = NEW(T * B * H);
    job.h_n = NEW(B * H);
    job.c_n = lstm ? NEW(B * H) : NULL;
    succeed(holdfast_forward(&job)); /* nothing kept */
    job.gates = NEW(T * B * 4 * padded);
    job.cells = lstm ? NEW(T * B * padded) : NULL;
    succeed(holdfast_forward(&job));
    all_finite("y", job.y, T * B * H);
    all_finite("h_n", job.h_n, B * H);
    if (lstm) all_finite("c_n", job.c_n, B * H);

    job.dy = NEW(T * B * H);
    job.dh_n = NEW(B * H);
    job.dc_n = lstm ? NEW(B * H) : NULL;
    succeed(holdfast_backward(&job)); /* no gradient wanted */
    job.dx = NEW(T * B * I);
    job.dh0 = NEW(B * H);
    job.dc0 = lstm ? NEW(B * H) : NULL;
    job.dfill_h = fills ? NEW(H) : NULL;
    job.dfill_c = fills && lstm ? NEW(H) : NULL;
    job.dw_ih = NEW(G * H * I);
    job.dw_hh = NEW(G * H * H);
    job.db_ih = bias ? NEW(G * H) : NULL;
    job.db_hh = bias ? NEW(G * H) : NULL;
    succeed(holdfast_backward(&job));
    all_finite("dx", job.dx, T * B * I);
    all_finite("dw_ih", job.dw_ih, G * H * I);
    all_finite("dw_hh", job.dw_hh, G * H * H);

    if (T == 1 && !cut) {
        job.gates = job.cells = job.h_n = NULL;
        succeed(holdfast_step(&job));
        all_finite("h", job.y, B * H);
    }
    while (count) free(owned[--count]);
    free(resets);
}

int main(void) {
    const char *isas[] = {"plain", "avx2", "avx512"};
    const int64_t shapes[][4] = {{1, 1, 1, 1},    {3, 2, 5, 7},   {7, 3, 16, 16}, {5, 65, 3, 33}, {130, 1, 9, 20},
                                 {20, 13, 70, 8}, {1, 5, 17, 31}, {1, 30, 4, 6},  {0, 3, 2, 4},   {4, 0, 2, 4},
                                 {2, 200, 1, 3},  {3, 9, 65, 100}};
    int sets = 0;
    for (int i = 0; i < 3; i++) {
        if (!holdfast_choose(isas[i])) continue;
        sets++;
        for (size_t n = 0; n < sizeof shapes / sizeof *shapes; n++)
            for (int lstm = 0; lstm < 2; lstm++)
                for (int mode = 0; mode < 4; mode++) {
                    const int64_t *s = shapes[n];
                    const double p = mode == 0 ? -1.0 : mode == 1 ? 0.3 : mode == 2 ? 1.1 : 0.3;
                    run(s[0], s[1], s[2], s[3], lstm, mode == 3, mode == 1, mode != 2, p, mode % 2 ? 3 : 1);
                }
    }
    printf("clean: %d instruction sets\n", sets);
    return 0;
}
